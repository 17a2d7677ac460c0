"""Path contributions of real trainings, against every step taken at four points.

Residual and parts error of the default tolerance: on digits a perceptron and a network of convolutions, on a text an
LSTM and a Transformer. Fast tests on made-up data are in `test_path_contributions.py`.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from dualform.attend import path
from dualform.attend.path import PathContributions
from dualform.effects import path_contributions
from dualform.effects.path_walk import PathSettings
from dualform.experiments.character_model import CHARACTERS, characters, encode_characters
from dualform.experiments.datasets import load, load_text
from dualform.experiments.image_training import make_tasks
from dualform.experiments.models import lstm, mlp, residual
from dualform.logits import logits_of

STEPS = 40
TESTS = 3
LENGTH = 24
"""Characters of a passage."""
SOURCES = 4
"""Pieces of a text that its passages are grouped by."""


@dataclass(frozen=True, slots=True, eq=False)
class Training:
    """A network, its optimizer, and what it is trained on and tested with.

    Attributes:
        model: the network.
        optimizer: its optimizer.
        batches: (inputs, targets, groups) of every step.
        tests: (inputs, targets).
        quantity: what is asked about.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[tuple[Tensor, Tensor, Tensor]]
    tests: tuple[Tensor, Tensor]
    quantity: Any


def on_digits(model: nn.Module, optimizer: torch.optim.Optimizer, *, as_images: bool) -> Training:
    (task,) = make_tasks([load("digits")])
    generator = torch.Generator().manual_seed(0)
    shape = (-1, 1, 8, 8) if as_images else (-1, 64)

    def batches() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for _ in range(STEPS):
            rows = torch.randint(len(task.train), (32,), generator=generator)
            yield task.train[rows].reshape(shape), task.train_labels[rows], task.train_labels[rows]

    tests = task.test[:TESTS].reshape(shape), task.test_labels[:TESTS]
    return Training(model, optimizer, batches(), tests, "logit")


def on_text(model: nn.Module, optimizer: torch.optim.Optimizer) -> Training:
    text = load_text("standard-library")
    train, test = (encode_characters(part[:20_000]) for part in (text.train, text.test))
    generator = torch.Generator().manual_seed(0)

    def passages(of: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        starts = torch.randint(len(of) - LENGTH - 1, (count,), generator=generator)
        rows = of[starts[:, None] + torch.arange(LENGTH + 1)]
        return rows[:, :-1], rows[:, 1:], starts * SOURCES // len(of)

    def batches() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for _ in range(STEPS):
            yield passages(train, 16)

    inputs, targets, _ = passages(test, TESTS)
    return Training(model, optimizer, batches(), (inputs, targets), "loss")


def perceptron() -> Training:
    model = mlp([64, 128, 128, 10])
    return on_digits(model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), as_images=False)


def convolutions() -> Training:
    model = residual([8, 16], 10)
    return on_digits(model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), as_images=True)


def recurrent() -> Training:
    model = lstm(tokens=CHARACTERS, embedding=16, units=32)
    return on_text(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))


def attending() -> Training:
    model = characters(width=32, length=LENGTH)
    return on_text(model, torch.optim.AdamW(model.parameters(), lr=0.003, weight_decay=0.01))


def every_step(*arguments: Any, **options: Any) -> PathSettings:
    """Return settings that take every step as a segment, at four points."""
    return replace(PathSettings(*arguments, **options), longest=1, points=4)


@dataclass(frozen=True, slots=True)
class Exactness:
    """How exact the path contributions of one training are.

    Attributes:
        losses: the training's loss at each step.
        found: the path contributions with the default tolerance.
        exact: those with every step as a segment, at four points.
    """

    losses: list[float]
    found: PathContributions
    exact: PathContributions

    @property
    def parts_error(self) -> float:
        """The difference of the parts, relative to their size."""
        return float((self.found.values - self.exact.values).abs().sum() / self.exact.values.abs().sum())


def measure(run: Path, make: Callable[[], Training], patch: pytest.MonkeyPatch) -> Exactness:
    torch.manual_seed(0)
    training = make()
    model, optimizer = training.model, training.optimizer
    losses = []
    with dualform.record(model, optimizer, run) as recorder:
        for inputs, targets, groups in training.batches:
            recorder.annotate(group=groups)
            loss = functional.cross_entropy(logits_of(model(inputs)).flatten(0, -2), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(float(loss.detach()))
    inputs, targets = training.tests

    def ask() -> PathContributions:
        shutil.rmtree(run / "cache", ignore_errors=True)  # answers are kept there
        spotlight = dualform.open(run).attend(model, inputs, targets=targets, quantity=training.quantity)
        return spotlight.path_contributions(by="group")

    found = ask()
    patch.setattr(path, "PathSettings", every_step)
    return Exactness(losses, found, ask())


@pytest.mark.slow
@pytest.mark.parametrize("make", [perceptron, convolutions, recurrent, attending])
def test_residual_and_parts_error_of_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Training]
) -> None:
    monkeypatch.setattr(path_contributions, "FEWEST_SEGMENTS", 8)  # so that few steps have segments of several, too
    measured = measure(tmp_path / "run", make, monkeypatch)
    losses, found, exact = measured.losses, measured.found, measured.exact
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])  # it has learnt something
    assert exact.evaluations >= 4 * STEPS
    assert found.parts_error > 0  # segments of several steps were compared
    assert found.residual_error <= 0.01
    assert measured.parts_error <= 0.02
    whole = found.start + found.values.sum(1) + found.state + found.rest + found.residual
    torch.testing.assert_close(whole, found.output)
