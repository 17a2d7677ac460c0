"""The paper's three image studies: their data, their training, and the paper's results."""

from dataclasses import dataclass
from typing import Literal

from dualform.errors import DataError
from dualform.experiments.datasets import ImageSet, load, permuted
from dualform.experiments.image_training import ClassifierRecipe, Phase

ImageStudyName = Literal["single", "joint", "continual"]
IMAGE_STUDIES: tuple[ImageStudyName, ...] = ("single", "joint", "continual")

SMALL_RECIPE = ClassifierRecipe(hidden=(128, 128), learning_rate=0.02, momentum=0.9, clip=1.0, batch=64)
PAPER_RECIPE = ClassifierRecipe()

TABLE_1 = {
    "layers.0": ((17.2, 2.7), (49.5, 1.5), (75.1, 0.0)),
    "layers.1": ((18.0, 2.9), (52.9, 2.9), (78.8, 0.8)),
    "layers.2": ((20.6, 2.6), (60.1, 4.5), (84.7, 1.1)),
}
"""The paper's Table 1, MNIST: mean and deviation of each column, per layer."""

ACCURACY = {
    "single": {"mnist": 97.0},
    "joint": {"mnist": 97.0, "fashion-mnist": 87.0},
    "continual": {"mnist": 45.0, "fashion-mnist": 85.0},
}
"""The paper's test accuracies, in percent."""


@dataclass(frozen=True, slots=True)
class ImageStudy:
    """One study on one collection of data."""

    name: ImageStudyName
    data: str
    tasks: tuple[str, ...]
    phases: tuple[Phase, ...]
    recipe: ClassifierRecipe

    @property
    def steps(self) -> int:
        """Updates in all."""
        return sum(phase.steps for phase in self.phases)


def image_study(name: ImageStudyName, data: str) -> ImageStudy:
    """Return a study on `mnist` (the paper's), `digits` (small and instant), or, for single, `cifar-10`."""
    if data == "cifar-10" and name == "single":
        return ImageStudy(name, data, (data,), (Phase((data,), 5000),), PAPER_RECIPE)
    if data not in ("mnist", "digits"):
        known = "mnist, digits, or cifar-10" if name == "single" else "mnist or digits"
        raise DataError(f"The {name} study runs on {known}; {data!r} came.")
    large = data == "mnist"
    first, second = (data, "fashion-mnist" if large else f"{data}-permuted")
    recipe = PAPER_RECIPE if large else SMALL_RECIPE
    once, joint = (3000, 5000) if large else (400, 800)
    match name:
        case "single":
            return ImageStudy(name, data, (first,), (Phase((first,), once),), recipe)
        case "joint":
            return ImageStudy(name, data, (first, second), (Phase((first, second), joint),), recipe)
        case "continual":
            phases = (Phase((first,), once), Phase((second,), once))
            return ImageStudy(name, data, (first, second), phases, recipe)


def load_sets(names: tuple[str, ...]) -> list[ImageSet]:
    """Load the image sets of a study; a permuted set is made from its original."""
    suffix = "-permuted"
    return [permuted(load(name.removesuffix(suffix))) if name.endswith(suffix) else load(name) for name in names]
