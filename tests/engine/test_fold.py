"""Folds over the steps: SGD's shares too, and one reading and one replay for folds and sweeps that are run together."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import dualform
from dualform.attend.conditions import Condition
from dualform.attend.groups import Table
from dualform.engine import rebuild, sweep
from dualform.engine.jobs import Fold
from dualform.engine.local import LocalExecutor
from dualform.engine.parameter_steps import ParameterSteps
from dualform.engine.plain import PlainExecutor
from dualform.engine.shares import MaskGroup, SharesOf, fold_shares
from dualform.engine.stored_calls import StepReader
from dualform.store.reader import Run

STEPS = 9


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.01, maximize=True)


def train(path: Path, make: Callable[[nn.Module], Optimizer], *, restart: int | None = None) -> nn.Module:
    """Record a small model, float64, whose optimizer's state is cleared before one of the steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    optimizer = make(model)
    with dualform.record(model, optimizer, path, shard_bytes=2000) as recorder:
        for step in range(STEPS):
            if step == restart:
                optimizer.state.clear()
            recorder.annotate(label=torch.arange(6) % 3)
            optimizer.zero_grad()
            inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            model(inputs).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    return model


@pytest.mark.parametrize("restart", [None, 4], ids=["one buffer", "a buffer that was cleared"])
@pytest.mark.parametrize("horizon", [STEPS, 5])
def test_the_shares_of_sgd_in_the_order_of_steps_are_those_of_its_coefficients(
    run: Path, restart: int | None, horizon: int
) -> None:
    model = train(run, sgd, restart=restart)
    source = Run(run)
    view = Table(source, (Condition("label <> 1"),), horizon, PlainExecutor())
    expected = rebuild.parts(source, view, PlainExecutor())
    fold = Fold(tuple(source.initial), horizon, SharesOf(1), MaskGroup(view.mask))
    found = PlainExecutor().run(source, [fold])[0]
    for name, part in expected.items():
        torch.testing.assert_close(found[name].shares[0], part.share, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(found[name].start, part.start, rtol=1e-12, atol=1e-14)
        if horizon == STEPS:
            torch.testing.assert_close(found[name].parameter, model.get_parameter(name).detach(), rtol=1e-12, atol=0)


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """Count the calls of a function from now on."""
    calls: list[Any] = []
    real = getattr(owner, name)

    def count(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, count)
    return calls


def test_folds_that_are_run_together_read_each_step_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(run, adamw)
    source = Run(run)
    read, taken = (counted(monkeypatch, *what) for what in ((StepReader, "calls"), (ParameterSteps, "take")))
    folds = [fold_shares(source, layers, horizon=STEPS, groups=groups) for layers in ("02", "2") for groups in (0, 1)]
    LocalExecutor().run(source, folds)
    assert len(read) == STEPS
    assert len(taken) == STEPS * len(source.initial)


def test_contributions_to_all_units_take_one_sweep(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(run, adamw)
    queries = torch.randn(2, 4, dtype=torch.float64)
    alone = dualform.open(run).attend(queries={"2": queries})["2"]
    monkeypatch.setattr("dualform.attend.layer.SWEEP_UNITS", 1)
    expected = alone.contributions()
    monkeypatch.undo()
    sweeps = counted(monkeypatch, sweep, "multipliers")
    together = dualform.open(run).attend(queries={"2": queries.clone()})["2"]
    assert torch.equal(together.contributions(), expected)
    assert len(sweeps) == 1
    monkeypatch.setattr("dualform.attend.layer.SWEEP_UNITS", 2)
    blocks = dualform.open(run).attend(queries={"2": queries.clone()})["2"]
    assert torch.equal(blocks.contributions(), expected)
    assert len(sweeps) == 1 + 2
