"""Single test examples, looked at closely: per layer attention by group, its totals, and the top training images."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dualform.attend.answers import GroupTotals, Ranking
from dualform.attend.memory import Memory
from dualform.experiments.image_training import Task
from dualform.show import figures
from dualform.show.figures import LayerPanels

CURVE_PATTERNS = 500  # the paper's figures show the strongest 500 patterns of each class
TOP_IMAGES = 3


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One test example: its task, its number there, its class, and the class that the model predicts."""

    task: Task
    number: int  # in the task's test set
    target: int
    output: int

    @property
    def image(self) -> npt.NDArray[Any]:
        """The image as people see it."""
        image: npt.NDArray[Any] = self.task.images.test_images[self.number]
        return image

    @property
    def right(self) -> bool:
        """Whether the model is right."""
        return self.target == self.output


@dataclass(frozen=True, slots=True, eq=False)
class Closeup:
    """The attention of some examples, by layer; the queries are the examples in order."""

    examples: Sequence[Example]
    curves: Mapping[str, Ranking]
    totals: Mapping[str, GroupTotals]
    top: Mapping[str, Ranking]


def choose_examples(task: Task, outputs: Tensor, *, right: int, wrong: int) -> list[Example]:
    """Return the first test examples that the model gets right, one per class while they last, then some wrong ones."""
    hits = (outputs == task.test_labels).nonzero()[:, 0].tolist()
    misses = (outputs != task.test_labels).nonzero()[:, 0].tolist()
    seen: set[int] = set()
    varied = [i for i in hits if (label := int(task.test_labels[i])) not in seen and not seen.add(label)]  # type: ignore[func-returns-value]
    rest = [i for i in hits if i not in set(varied)]
    return [
        Example(task, i, int(task.test_labels[i]), int(outputs[i])) for i in [*(varied + rest)[:right], *misses[:wrong]]
    ]


def attend_examples(memory: Memory, model: nn.Module, examples: Sequence[Example], *, by: str | list[str]) -> Closeup:
    """Ask every layer what the examples attend to, by class or by task and class."""
    inputs = torch.stack([example.task.test[example.number] for example in examples])
    spotlight = memory.attend(model, inputs)
    return Closeup(
        examples=examples,
        curves={name: layer.top(CURVE_PATTERNS, by=by) for name, layer in spotlight.layers.items()},
        totals={name: layer.totals(by) for name, layer in spotlight.layers.items()},
        top={name: layer.top(TOP_IMAGES, per="sample") for name, layer in spotlight.layers.items()},
    )


def training_image(tasks: Sequence[Task], sample: int) -> npt.NDArray[Any]:
    """Return the training image with this sample number."""
    task = max((task for task in tasks if task.first_sample <= sample), key=lambda task: task.first_sample)
    image: npt.NDArray[Any] = task.images.train_images[sample - task.first_sample]
    return image


def attended(closeup: Closeup, layer: str, query: int) -> list[dict[str, Any]]:
    """Return the top patterns of one example in one layer, with their annotations, best first."""
    rows = closeup.top[layer].to_arrow().to_pylist()
    return [row for row in rows if row["query"] == query]


def draw_figures(closeup: Closeup, tasks: Sequence[Task], folder: Path, *, prefix: str) -> list[Path]:
    """Draw curves, totals and top images of every example."""
    paths = []
    for query, example in enumerate(closeup.examples):
        verdict = "right" if example.right else "wrong"
        name = f"{prefix}-{verdict}-{query}"
        title = f"{example.task.name} test image {example.number}: target {example.target}, output {example.output}"
        groups = next(iter(closeup.totals.values())).groups
        curves = {layer: top.values[query].cpu().numpy() for layer, top in closeup.curves.items()}
        sums = {layer: totals.values[query].cpu().numpy() for layer, totals in closeup.totals.items()}
        panels = LayerPanels(
            curves, groups, example.target, example.output,
            f"{title}. The {CURVE_PATTERNS} strongest training patterns of each class",
        )  # fmt: skip
        paths.append(figures.curves(folder / f"{name}-curves.png", panels))
        panels = dataclasses.replace(panels, layers=sums, title=f"{title}. Total attention per class")
        paths.append(figures.totals(folder / f"{name}-totals.png", panels))
        rows = {
            layer: [
                (
                    f"label {row['label']}, {row['occurrences']} times\nattention {row['attention']:.4g}",
                    np.asarray(training_image(tasks, row["sample"])),
                )
                for row in attended(closeup, layer, query)
            ]
            for layer in closeup.top
        }
        caption = f"test image\ntarget {example.target}"
        paths.append(
            figures.gallery(
                folder / f"{name}-top.png", example.image, rows, caption=caption,
                title=f"{title}. Training images it attends to most",
            )
        )  # fmt: skip
    return paths
