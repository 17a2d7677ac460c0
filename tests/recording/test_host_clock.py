"""How long a recording takes of each step, by a clock that only moves when a test says so."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dualform
from conformance.sinks import ListSink
from dualform.recording import hooks, host_clock, pattern_copies
from dualform.recording.host_clock import HostClock
from dualform.recording.recorder import Recorder
from helpers.loops import batches, mlp, sgd, train


@pytest.fixture
def spend(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that lets the recorder's clock go on by some seconds."""
    now = [0.0]

    def spend_seconds(seconds: float) -> None:
        now[0] += seconds

    for module in (hooks, host_clock):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    return spend_seconds


def test_seconds_are_added_up_and_divided_into_steps(spend: Callable[[float], None]) -> None:
    clock = HostClock()
    with clock:
        spend(2.0)
    spend(100.0)
    with contextlib.suppress(ValueError), clock:
        spend(1.0)
        raise ValueError("an error")
    assert (clock.seconds, clock.step_seconds) == (3.0, 0.0)
    clock.end_step()
    with clock:
        spend(4.0)
    assert clock.step_seconds == 3.0
    clock.end_step()
    assert (clock.seconds, clock.step_seconds) == (7.0, 4.0)


class SlowSink(ListSink):
    """Takes a second for each call, 10 before a step, 100 after it, 1000 to look at columns."""

    def __init__(self, spend: Callable[[float], None]) -> None:
        super().__init__()
        self._spend = spend

    def check(self, binding: Any) -> None:
        self._spend(1000.0)

    def call(self, record: Any) -> None:
        self._spend(1.0)
        super().call(record)

    def before_step(self, prepared: Any) -> None:
        self._spend(10.0)

    def step(self, facts: Any) -> None:
        self._spend(100.0)
        super().step(facts)


class SlowLayer(nn.Module):
    """A part of the user's model that takes its time, forwards and backwards."""

    def __init__(self, spend: Callable[[float], None]) -> None:
        super().__init__()
        self._spend = spend

    def forward(self, inputs: Tensor) -> Tensor:
        self._spend(1e6)
        if inputs.requires_grad:
            inputs.register_hook(lambda _: self._spend(1e6))
        return inputs


def test_the_sink_counts_and_the_training_does_not(spend: Callable[[float], None]) -> None:
    model = nn.Sequential(nn.Linear(5, 7), SlowLayer(spend), nn.Linear(7, 3))
    optimizer = sgd(model)
    with Recorder(model, optimizer, SlowSink(spend), check_rows=False) as recorder:
        assert recorder.overhead == 0
        recorder.annotate(source="books")
        train(model, optimizer, batches(1))
        assert recorder.overhead == 1112.0
        train(model, optimizer, batches(1))
        assert recorder.overhead == 112.0


def test_what_hooks_take_counts(spend: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    copy, note, at = pattern_copies.copy_patterns, hooks.Hooks._note_call, hooks.TaskArrivals.at

    def taking(seconds: float, inner: Any) -> Any:
        def slow(*args: Any) -> Any:
            spend(seconds)
            return inner(*args)

        return slow

    monkeypatch.setattr(hooks, "copy_patterns", taking(1.0, copy))
    monkeypatch.setattr(hooks.Hooks, "_note_call", taking(10.0, note))
    monkeypatch.setattr(hooks.TaskArrivals, "at", taking(100.0, at))
    model = mlp()
    optimizer = sgd(model)
    with Recorder(model, optimizer, ListSink()) as recorder:
        train(model, optimizer, batches(1))
        assert recorder.overhead == 222.0


def test_a_real_recording_takes_less_than_its_training(run: Path) -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    overheads = []
    begin = perf_counter()
    with dualform.record(model, optimizer, run) as recorder:
        for batch in batches(4):
            train(model, optimizer, [batch])
            overheads.append(recorder.overhead)
    assert all(seconds > 0 for seconds in overheads)
    assert sum(overheads) < perf_counter() - begin
