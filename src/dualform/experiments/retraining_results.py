"""What evaluations of effects found, as small JSON files beside their recipes; pages are written from them."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dualform.errors import DataError
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
        scores: method -> number of a split that it was asked about -> score.
        earlier: row of the table -> its cell in an earlier run of the same recipe, for methods not asked again.
        costs: method -> what it took, in one split.
    """

    config: RetrainingConfig
    scores: Mapping[str, Mapping[int, float]]
    earlier: Mapping[str, str] = dataclasses.field(default_factory=dict)
    costs: Mapping[str, Cost] = dataclasses.field(default_factory=dict)

    @property
    def splits(self) -> list[int]:
        """The numbers of the splits that were run."""
        return sorted({number for each in self.scores.values() for number in each})


def store_evaluation(folder: Path, found: Evaluation) -> None:
    """Write an evaluation to the file of its name, which keeps what it has and the evaluation has not.

    That is the cells of earlier runs, methods that were not asked, their costs, and each method's scores of other
    splits. A file of another recipe is refused; one that differs in the number of splits alone is not, since the data
    and seeds of a split follow from its number.
    """
    path = folder / f"{found.config.name}.json"
    before = _load_evaluation(path) if path.is_file() else Evaluation(found.config, {})
    if differing := _differing_settings(before.config, found.config):
        raise DataError(
            f"{path} holds scores of another recipe, which differs in {', '.join(differing)}. Give the recipe another "
            "name, or move the file away."
        )
    scores = {name: dict(each) for name, each in before.scores.items()}
    for name, each in found.scores.items():
        scores.setdefault(name, {}).update({number: round(score, 4) for number, score in each.items()})
    content = {
        "config": dataclasses.asdict(found.config),
        "scores": {name: {str(number): each[number] for number in sorted(each)} for name, each in scores.items()},
        "earlier": {**before.earlier, **found.earlier},
        "costs": _plain_costs({**before.costs, **found.costs}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def _differing_settings(a: RetrainingConfig, b: RetrainingConfig) -> list[str]:
    """Return the settings of two recipes, but for the number of splits, that are not the same."""
    names = [field.name for field in dataclasses.fields(RetrainingConfig) if field.name != "splits"]
    return [name for name in names if getattr(a, name) != getattr(b, name)]


def load_evaluations(folder: Path) -> list[Evaluation]:
    """Return the evaluations in a folder, by name."""
    return [_load_evaluation(path) for path in sorted(folder.glob("*.json"))]


def _load_evaluation(path: Path) -> Evaluation:
    content = json.loads(path.read_text("utf-8"))
    config = content["config"] | {"hidden": tuple(content["config"]["hidden"])}
    scores = {name: {int(number): score for number, score in each.items()} for name, each in content["scores"].items()}
    return Evaluation(RetrainingConfig(**config), scores, content["earlier"], _costs_from(content["costs"]))


def store_costs(path: Path, costs: Mapping[str, Cost]) -> None:
    """Write costs to a file."""
    path.write_text(json.dumps(_plain_costs(costs), indent=1) + "\n", "utf-8")


def load_costs(path: Path) -> dict[str, Cost]:
    """Return the costs in a file."""
    return _costs_from(json.loads(path.read_text("utf-8")))


def _costs_from(plain: Mapping[str, tuple[float, int]]) -> dict[str, Cost]:
    return {name: Cost(*each) for name, each in plain.items()}


def _plain_costs(costs: Mapping[str, Cost]) -> dict[str, tuple[float, int]]:
    return {name: (round(cost.seconds, 3), cost.size) for name, cost in costs.items()}
