"""What evaluations of effects found, as small JSON files beside their recipes; pages are written from them."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dualform.experiments.retraining_config import RetrainingConfig


@dataclass(frozen=True, slots=True)
class Cost:
    """What a method takes to score all samples for all test inputs of a split.

    Attributes:
        seconds: of a processor, once the networks are trained.
        size: bytes of what it keeps of the training, the training data not counted.
    """

    seconds: float
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """What one evaluation found.

    Attributes:
        config: its recipe.
        scores: method -> the score of each split that was run.
        earlier: row of the table -> its cell in an earlier run of the same recipe, for methods not asked again.
        costs: method -> what it took, in one split.
    """

    config: RetrainingConfig
    scores: Mapping[str, list[float]]
    earlier: Mapping[str, str] = dataclasses.field(default_factory=dict)
    costs: Mapping[str, Cost] = dataclasses.field(default_factory=dict)

    @property
    def splits(self) -> int:
        """How many splits were run."""
        return max(map(len, self.scores.values()), default=0)


def store_evaluation(folder: Path, found: Evaluation) -> None:
    """Write an evaluation to the file of its name, which keeps what it has and the evaluation has not.

    That is the cells of earlier runs, methods that were not asked, their costs, and the scores of further splits.
    """
    path = folder / f"{found.config.name}.json"
    before = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    scores = dict(before.get("scores", {}))
    for name, each in found.scores.items():
        scores[name] = [round(score, 4) for score in each] + scores.get(name, [])[len(each) :]
    content = {
        "config": dataclasses.asdict(found.config),
        "scores": scores,
        "earlier": {**before.get("earlier", {}), **found.earlier},
        "costs": {**before.get("costs", {}), **_plain_costs(found.costs)},
    }
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def load_evaluations(folder: Path) -> list[Evaluation]:
    """Return the evaluations in a folder, by name."""
    found = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text("utf-8"))
        config = content["config"] | {"hidden": tuple(content["config"]["hidden"])}
        costs = {name: Cost(*each) for name, each in content.get("costs", {}).items()}
        found.append(Evaluation(RetrainingConfig(**config), content["scores"], content["earlier"], costs))
    return found


def store_costs(path: Path, costs: Mapping[str, Cost]) -> None:
    """Write costs to a file."""
    path.write_text(json.dumps(_plain_costs(costs), indent=1) + "\n", "utf-8")


def load_costs(path: Path) -> dict[str, Cost]:
    """Return the costs in a file."""
    return {name: Cost(*each) for name, each in json.loads(path.read_text("utf-8")).items()}


def _plain_costs(costs: Mapping[str, Cost]) -> dict[str, tuple[float, int]]:
    return {name: (round(cost.seconds, 3), cost.size) for name, cost in costs.items()}
