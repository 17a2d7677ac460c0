"""Every question of the README on a memory of steps has the answer of a stored memory of the same training."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dualform
from dualform.attend.memory import Memory
from dualform.recording.keep import Patterns
from dualform.replaying.replay_executor import ReplayExecutor
from dualform.replaying.replayed_patterns import ReplayedPatterns
from dualform.replaying.training import Train, record_training
from dualform.store.memory_blobs import MemoryBlobs
from dualform.store.reader import Run
from helpers.trainings import MODELS, OPTIMIZERS, batch, make_training

CLOSE = 1e-5  # of the largest element


def both(train: Train, **options: Any) -> tuple[Memory, Memory, ReplayedPatterns, nn.Module]:
    """Record a training twice; return the memories of steps and of patterns, the replayed source, and the model."""
    steps, patterns = MemoryBlobs(), MemoryBlobs()
    model = record_training(train, steps, **options)
    record_training(train, patterns, keep=Patterns())
    source = ReplayedPatterns(Run(steps), train)
    memory = Memory(source, ReplayExecutor())
    return memory, dualform.open(patterns), source, model


def answers(memory: Memory, model: nn.Module, kind: str) -> dict[str, Any]:
    """Return the answers to the questions of the README, by name."""
    inputs, targets = batch(kind, 50)
    effects = targets.dim() == 1
    spotlight = memory.attend(model, inputs, targets=targets if effects else None)
    by = "label" if "label" in memory.columns else "letter"
    found: dict[str, Any] = {"passed": memory.verify(model).passed, "weights": memory.weights()}
    totals, best = spotlight.compute(dualform.Totals(by=by), dualform.Top(3))
    for name in memory.layers:
        found[f"totals {name}"], found[f"groups {name}"] = totals[name].values, totals[name].groups
        found[f"top {name}"], found[f"rows {name}"] = best[name].values, best[name].columns["sample"]
    layer = spotlight[list(memory.layers)[-1]]
    found |= {
        "attention": layer.attention(),
        "magnitude": layer.totals(by, of="magnitude").values,
        "contributions": layer.totals(["epoch", dualform.bins("step", width=2)], of="contribution").values,
        "output": layer.output(),
        "start": layer.start(),
        "top contributions": layer.top(2, of="contribution", per="pattern").values,
        "top samples": layer.top(2, by=by, per="sample").values,
        "vote": spotlight.vote(by=by).winners,
        "masked": memory.without(sample=[1, 2]).weights(),
        "shares": memory.where("step >= 2").shares(),
        "earlier": memory.at(step=3).weights(),
        "patterns": memory.patterns(layer.name).to_pydict(),
    }
    if effects:
        found["effects"] = spotlight.effects(by=by).values
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    for name, value in expected.items():
        if isinstance(value, Tensor):
            scale = float(value.abs().max()) if value.numel() else 1.0
            assert found[name].shape == value.shape, name
            torch.testing.assert_close(
                found[name].double() / max(scale, 1e-6),
                value.double() / max(scale, 1e-6),
                equal_nan=True,
                rtol=tolerance,
                atol=tolerance,
            )
        elif isinstance(value, dict) and all(isinstance(one, Tensor) for one in value.values()):
            assert_same(found[name], value, tolerance)
        else:
            assert found[name] == value, name


@pytest.mark.mostly_slow(fast=2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_memory_of_steps_answers_as_one_of_patterns(kind: str, optimizer: str) -> None:
    train = make_training(kind, optimizer)
    held, stored, source, model = both(train)
    expected = answers(stored, model, kind)
    assert expected["passed"]
    rounded = {"magnitude": expected.pop("magnitude")}  # without the range of keys it is measured, not looked up
    found = answers(held, model, kind)
    assert_same(found, expected, 0.0)
    assert_same(found, rounded, CLOSE)
    assert source.replays == 1  # its patterns are held
    for name in source.run.blobs.list("cache/"):
        source.run.blobs.remove(name)
    going_by = ReplayedPatterns(source.run, train, held_bytes=0)
    found = answers(Memory(going_by, ReplayExecutor()), model, kind)
    assert_same(found, expected | rounded, CLOSE)
    assert going_by.replays > 3
    assert not any(part.windows for part in going_by.parts())
