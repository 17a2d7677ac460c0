"""What evaluations of effects found, as small JSON files beside their recipes; pages are written from them."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dualform.experiments.retraining_config import RetrainingConfig


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """What one evaluation found.

    Attributes:
        config: its recipe.
        scores: method -> the score of each split that was run.
        earlier: row of the table -> its cell in an earlier run of the same recipe, for methods not asked again.
    """

    config: RetrainingConfig
    scores: Mapping[str, list[float]]
    earlier: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def splits(self) -> int:
        """How many splits were run."""
        return max(map(len, self.scores.values()), default=0)


def store_evaluation(folder: Path, found: Evaluation) -> None:
    """Write an evaluation to the file of its name, which keeps the cells of earlier runs that it has."""
    path = folder / f"{found.config.name}.json"
    earlier = {**_earlier(path), **found.earlier}
    rounded = {name: [round(score, 4) for score in scores] for name, scores in found.scores.items()}
    content = {"config": dataclasses.asdict(found.config), "scores": rounded, "earlier": earlier}
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def load_evaluations(folder: Path) -> list[Evaluation]:
    """Return the evaluations in a folder, by name."""
    found = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text("utf-8"))
        config = content["config"] | {"hidden": tuple(content["config"]["hidden"])}
        found.append(Evaluation(RetrainingConfig(**config), content["scores"], content["earlier"]))
    return found


def _earlier(path: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads(path.read_text("utf-8"))["earlier"] if path.is_file() else {}
    return found
