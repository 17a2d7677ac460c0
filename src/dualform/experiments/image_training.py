"""Train a classifier on one or several tasks while it is recorded. The paper's loop, for any of our image sets."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from dualform.experiments.datasets import ImageSet, moments, standardised
from dualform.experiments.models import mlp
from dualform.progress import bar
from dualform.recording.keep import Keep, Shares
from dualform.show.predictions import predict_units

FEW_TESTS = 100
"""Test examples of each task that a run keeps which is to stay small."""


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A data set as the network sees it; sample numbers of all tasks of a run are distinct."""

    name: str
    images: ImageSet
    train: Tensor  # (N, d)
    train_labels: Tensor  # (N,)
    test: Tensor  # (M, d)
    test_labels: Tensor  # (M,)
    first_sample: int


@dataclass(frozen=True, slots=True)
class ClassifierRecipe:
    """How a network is made and trained."""

    hidden: tuple[int, ...] = (800, 800)
    learning_rate: float = 3e-3
    momentum: float = 0.9
    clip: float = 1.0
    batch: int = 128


@dataclass(frozen=True, slots=True)
class Phase:
    """A number of updates on batches that are drawn from all of these tasks together."""

    tasks: tuple[str, ...]
    steps: int


def make_tasks(sets: Sequence[ImageSet]) -> tuple[Task, ...]:
    """Standardise image sets and number their samples through."""
    tasks = []
    first = 0
    for images in sets:
        train, test = standardised(images)
        labels = (torch.from_numpy(part) for part in (images.train_labels, images.test_labels))
        train_labels, test_labels = labels
        tasks.append(Task(images.name, images, train, train_labels, test, test_labels, first))
        first += len(train)
    return tuple(tasks)


def train_classifier(
    tasks: Sequence[Task],
    phases: Sequence[Phase],
    recipe: ClassifierRecipe,
    folder: Path,
    *,
    seed: int,
    dtype: Literal["float16"] | None = None,
    device: str = "cpu",
    keep: Keep | None = None,
) -> nn.Module:
    """Train a network from scratch, recording every layer to `folder`.

    Patterns are annotated with `sample`, `label`, `task`, and `coin`, a fair coin that puts a random half of each
    batch apart as a control. A run that keeps shares keeps no images of single samples, and few tests.
    """
    torch.manual_seed(seed)
    widths = [tasks[0].train.shape[1], *recipe.hidden, len(tasks[0].images.class_names)]
    model = mlp(widths).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.learning_rate, momentum=recipe.momentum)
    steps = sum(phase.steps for phase in phases)
    generator = torch.Generator().manual_seed(seed)
    recorder = dualform.record(
        model,
        optimizer,
        folder,
        dtype=dtype,
        keep=keep,
        strict=True,
        steps=steps,
        factory="dualform.experiments.models:mlp",
        factory_arguments={"widths": widths},
    )
    with recorder, bar("training", total=steps) as advance:
        _show(recorder, tasks, few=isinstance(keep, Shares))
        for phase in phases:
            chosen = [task for task in tasks if task.name in phase.tasks]
            inputs = torch.cat([task.train for task in chosen])
            labels = torch.cat([task.train_labels for task in chosen])
            samples = torch.cat([task.first_sample + torch.arange(len(task.train)) for task in chosen])
            names = [task.name for task in chosen for _ in range(len(task.train))]
            for rows in _batches(len(inputs), recipe.batch, phase.steps, generator):
                coin = torch.arange(len(rows)).remainder(2)[torch.randperm(len(rows), generator=generator)]
                recorder.annotate(
                    sample=samples[rows], label=labels[rows], task=[names[i] for i in rows.tolist()], coin=coin
                )
                loss = functional.cross_entropy(model(inputs[rows].to(device)), labels[rows].to(device))
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
                optimizer.step()
                advance(1)
    return model


def _show(recorder: dualform.Recorder, tasks: Sequence[Task], *, few: bool) -> None:
    """Let the run keep what people look at: every training image once, the names of labels, and the test examples.

    A drawn image can be asked about where all tasks are standardised alike; with several, nobody can say by which.

    Args:
        recorder: the recording.
        tasks: the tasks that it is trained on.
        few: keep no training images, which nobody can be shown without patterns, and the first tests of each task.
    """
    tested = slice(FEW_TESTS if few else None)
    samples = [task.first_sample + torch.arange(len(task.train)) for task in tasks]
    classes = zip(*(task.images.class_names for task in tasks), strict=True)
    white = 255 // max(int(task.images.train_images.max()) for task in tasks)  # digits have 16 shades
    mean, deviation = moments(tasks[0].images.train_images)
    images = np.concatenate([task.images.train_images for task in tasks])
    recorder.media(
        **({} if few else {"images": white * images, "samples": torch.cat(samples)}),
        labels=[" / ".join(dict.fromkeys(names)) for names in classes],
        **({"mean": white * mean, "deviation": white * deviation} if len(tasks) == 1 else {}),
    )
    recorder.tests(
        torch.cat([task.test[tested] for task in tasks]),
        torch.cat([task.test_labels[tested] for task in tasks]),
        images=white * np.concatenate([task.images.test_images[tested] for task in tasks]),
    )


def _batches(count: int, batch: int, steps: int, generator: torch.Generator) -> list[Tensor]:
    """Return the row numbers of every batch: whole epochs, each in a new order, without the last short batch."""
    batch = min(batch, count)
    batches: list[Tensor] = []
    while len(batches) < steps:
        order = torch.randperm(count, generator=generator)
        batches += order[: count - count % batch].split(batch)
    return batches[:steps]


def accuracy(model: nn.Module, task: Task) -> float:
    """Return the model's accuracy on a task's test images."""
    return float((predict_units(model, task.test) == task.test_labels).double().mean())
