"""Copies of keys and values: calls that are copied together have what each of them would have by itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dualform
from dualform.attend.memory import Memory
from dualform.errors import RefusedError
from dualform.recording import pattern_copies
from dualform.recording.buffer_pool import BufferPool
from dualform.recording.check_schedule import CheckSchedule
from dualform.recording.hooks import Arrival, Call
from dualform.recording.layers import gates
from dualform.recording.pattern_copies import copy_patterns
from dualform.recording.watch import Watched, watch
from dualform.replaying.replay_executor import ReplayExecutor
from dualform.replaying.replayed_patterns import ReplayedPatterns
from dualform.store.reader import Run


def arrivals_of(layers: list[Watched], shapes: list[tuple[int, ...]]) -> tuple[list[Arrival], list[Tensor]]:
    """Return arrivals of calls of the layers in turn, the last call first, and the tensors that they refer to."""
    torch.manual_seed(0)
    found, tensors = [], []
    for number, shape in enumerate(shapes):
        inputs, error = torch.randn(*shape, 3), torch.randn(*shape, 4)
        layer = layers[number % len(layers)]
        found.append(Arrival(Call(layer, number, inputs, False, None, None), [error]))
        tensors += [inputs, error]
    return found[::-1], tensors


@pytest.mark.parametrize("keys_only", [False, True])
@pytest.mark.parametrize("shapes", [[(2,), (1,), (2, 3), (0,), (5,), ()], [(2,), (1,), (1,), (0,), (5,), (1,)]])
def test_joined_copies_are_those_of_each_call(
    keys_only: bool, shapes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.ModuleList([nn.Linear(3, 4), nn.Linear(3, 4)])
    layers = list(watch(model, {"*": "keys"} if keys_only else None))
    together, tensors = arrivals_of(layers, shapes)
    copy_patterns(together, BufferPool(), lambda layer: True)
    monkeypatch.setattr(pattern_copies, "MAX_JOINED_BYTES", -1)
    apart, _ = arrivals_of(layers, shapes)
    copy_patterns(apart, BufferPool(), lambda layer: True)
    for tensor in tensors:
        tensor.fill_(float("nan"))  # the user's memory is used again
    for one, other in zip(together, apart, strict=True):
        assert one.accumulated
        assert one.keys is not None
        assert other.keys is not None
        assert torch.equal(one.keys, other.keys)
        assert tuple(one.leading) == tuple(other.leading)
        if keys_only:
            assert one.values is None
        else:
            assert one.values is not None
            assert other.values is not None
            assert torch.equal(one.values, other.values)
    bases = {arrival.keys.untyped_storage().data_ptr() for arrival in together if arrival.keys is not None}
    assert len(bases) == len(layers)  # one tensor for each layer


def train_recurrent(recording: Any) -> nn.Module:
    """Train an LSTM for 30 steps, of which the first 20 and a few others are checked in full."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"lstm": nn.LSTM(3, 4, batch_first=True), "head": nn.Linear(4, 2)})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with recording(model, optimizer, check_rows=False) as recorder:
        for _ in range(30):
            recorder.annotate(sample=[0, 1])
            outputs, _ = model["lstm"](torch.randn(2, 5, 3))
            optimizer.zero_grad()
            model["head"](outputs).square().mean().backward()
            optimizer.step()
    return model


@pytest.fixture
def gate_errors(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The calls of the LSTM's own backward, which finds its values."""
    calls: list[int] = []
    real = gates.LSTM.errors

    def counted(*args: Any) -> torch.Tensor:
        calls.append(len(calls))
        return real(*args)

    monkeypatch.setattr(gates.LSTM, "errors", counted)
    return calls


def test_a_run_of_steps_finds_values_for_its_checks_alone(tmp_path: Path, gate_errors: list[int]) -> None:
    stored = dualform.record_training(train_recurrent, tmp_path / "patterns", keep=dualform.Patterns())
    assert len(gate_errors) == 30
    gate_errors.clear()
    kept = dualform.record_training(train_recurrent, tmp_path / "steps")
    assert 20 <= len(gate_errors) < 30
    for mine, other in zip(kept.parameters(), stored.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_a_replay_finds_the_values_that_a_question_needs(tmp_path: Path, gate_errors: list[int]) -> None:
    dualform.record_training(train_recurrent, tmp_path / "patterns", keep=dualform.Patterns())
    model = dualform.record_training(train_recurrent, tmp_path / "steps")
    memory = Memory(ReplayedPatterns(Run(tmp_path / "steps"), train_recurrent, held_bytes=0), ReplayExecutor())
    gate_errors.clear()
    queries = {"lstm.l0": torch.randn(2, 7), "head": torch.randn(2, 4)}
    found = memory.attend(queries=queries).compute(dualform.Top(3))[0]
    assert not gate_errors
    expected = dualform.open(tmp_path / "patterns").attend(queries=queries).compute(dualform.Top(3))[0]
    for layer in queries:
        torch.testing.assert_close(found[layer].values, expected[layer].values)
    assert memory.verify(model)
    assert len(gate_errors) == 30


def test_values_that_nobody_wanted_are_found_for_a_check_that_nobody_foresaw(
    tmp_path: Path, gate_errors: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    unforeseen = property(lambda schedule: False, lambda schedule, value: None)
    monkeypatch.setattr(CheckSchedule, "next_is_full", unforeseen, raising=False)
    dualform.record_training(train_recurrent, tmp_path / "steps")
    assert 20 <= len(gate_errors) < 30
    monkeypatch.setattr("dualform.recording.gradient_check.find_late_values", lambda arrival: None)
    with pytest.raises(RefusedError, match="gradient"):
        dualform.record_training(train_recurrent, tmp_path / "without")
