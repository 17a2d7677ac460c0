"""Rates of learning: SGD's from its settings, the others' along the gradient, zero where nothing was updated."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer

import dualform
from dualform.attend.memory import Memory
from dualform.effects.rates import Rates, find_rates
from dualform.engine.plain import PlainExecutor
from helpers.small import batch

STEPS = 6


def train(path: Path, make: Callable[[Any], Optimizer], *, frozen: tuple[int, ...] = ()) -> tuple[Memory, list[Any]]:
    """Record a small linear layer; return the memory and each step's gradient of the weight."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3, bias=False).double()
    optimizer = make(model.parameters())
    gradients = []
    with dualform.record(model, optimizer, path):
        for step in range(STEPS):
            inputs, labels = batch(step, dtype=torch.float64)
            optimizer.zero_grad()
            if step not in frozen:
                functional.cross_entropy(model(inputs), labels).backward()
            gradients.append(None if model.weight.grad is None else model.weight.grad.clone())
            optimizer.step()
    return dualform.open(path), gradients


def rates_of(memory: Memory) -> Rates:
    (layer,) = memory.layers
    return find_rates(memory._run, PlainExecutor(), [layer], horizon=STEPS)[layer]


@pytest.mark.parametrize(
    ("settings", "rate", "decay"),
    [
        ({"lr": 0.1}, 0.1, 0.0),
        ({"lr": 0.1, "momentum": 0.9}, 1.0, 0.0),
        ({"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, 1.0, 0.1),
        ({"lr": 0.1, "momentum": 0.5, "dampening": 0.5}, 0.1, 0.0),
        ({"lr": 0.1, "weight_decay": 0.2}, 0.1, 0.02),
        ({"lr": 0.1, "maximize": True}, -0.1, 0.0),
    ],
)
def test_sgd(run: Path, settings: dict[str, Any], rate: float, decay: float) -> None:
    found = rates_of(train(run, lambda p: torch.optim.SGD(p, **settings))[0])
    np.testing.assert_allclose(found.rate, rate)
    np.testing.assert_allclose(found.decay, decay, atol=1e-15)


def test_a_step_without_an_update_has_no_rate(run: Path) -> None:
    found = rates_of(train(run, lambda p: torch.optim.SGD(p, lr=0.1), frozen=(2, 3))[0])
    np.testing.assert_allclose(found.rate, [0.1, 0.1, 0, 0, 0.1, 0.1])


def along(gradient: torch.Tensor, matrix: torch.Tensor) -> float:
    return float((matrix * gradient**2).sum() / (gradient**2).sum())


def test_adam_with_coupled_decay(run: Path) -> None:
    """Its second moments see the decayed gradient; its rate is measured along the gradient itself."""
    memory, gradients = train(run, lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1))
    found = rates_of(memory)
    second = torch.zeros(3, 5, dtype=torch.float64)
    for step, gradient in enumerate(gradients):
        weight = memory.at(step=step).weights()["weight"]
        second = 0.999 * second + 0.001 * (gradient + 0.1 * weight) ** 2
        expected = along(gradient, 0.01 / ((second / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8))
        assert found.rate[step] == pytest.approx(expected, rel=1e-6)
        assert found.decay[step] == pytest.approx(0.1 * expected, rel=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_rmsprop(run: Path, momentum: float) -> None:
    memory, gradients = train(run, lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=momentum))
    found = rates_of(memory)
    square = torch.zeros(3, 5, dtype=torch.float64)
    for step, gradient in enumerate(gradients):
        square = 0.99 * square + 0.01 * gradient**2
        expected = along(gradient, 0.01 / (square.sqrt() + 1e-8)) / (1 - momentum)
        assert found.rate[step] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("optimizer", ["AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "Muon"])
def test_every_other_optimizer_has_rates(run: Path, optimizer: str) -> None:
    """Positive, finite, and about as large as what the weight really moved along the first gradient."""
    kind = getattr(torch.optim, optimizer)
    memory, gradients = train(run, lambda p: kind(p, lr=0.05))
    found = rates_of(memory)
    assert bool(np.isfinite(found.rate).all() and (found.rate > 0).all())
    first = gradients[0]
    moved = memory.at(step=1).weights()["weight"] - memory.at(step=0).weights()["weight"]
    really = -float((moved * first).sum() / (first**2).sum())
    if optimizer in ("AdamW", "Adagrad", "Adadelta", "Adamax"):  # decay moves the weight too, if little
        assert found.rate[0] == pytest.approx(really, rel=0.05)
    assert 0.3 * really < found.rate[0] < 30 * really
