"""A step in progress: its phases as a training goes through them, and backwards that other optimizers wait for."""

import pytest
import torch

from conformance.sinks import ListSink
from dualform.recording.gradient_history import Accumulation, GradientHistory
from dualform.recording.gradient_samples import GradientSample
from dualform.recording.recorder import Recorder
from dualform.recording.step_in_progress import Backward, Phase, StepInProgress
from helpers.loops import batches, loss_of, mlp


def test_the_phases_of_a_step_with_two_optimizers() -> None:
    model = mlp()
    first, second = (torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2))
    seen: list[Phase] = []
    with Recorder(model, [first, second], ListSink()) as recorder:
        step = recorder._steps._step_now
        for optimizer in (first, second):
            optimizer.register_step_pre_hook(lambda *_: seen.append(step.phase))
        for x in batches(2):
            model.zero_grad()
            seen.append(step.phase)
            loss_of(model(x)).backward()
            for optimizer in (first, second):
                optimizer.step()
                seen.append(step.phase)
    assert seen == ["accumulating", "stepping", "taken", "stepping", "accumulating"] * 2


def test_a_step_that_fails_in_the_optimizer_stays_in_its_phase_until_the_next_one() -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, ListSink()) as recorder:
        step = recorder._steps._step_now
        handle = optimizer.register_step_pre_hook(fail)
        loss_of(model(batches(1)[0])).backward()
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        failed = step.phase
        handle.remove()
        optimizer.step()
        assert (failed, step.phase) == ("stepping", "accumulating")
        assert recorder.step == 1


def history(*micros: int) -> GradientHistory:
    sample = GradientSample(torch.ones(2))
    return GradientHistory(1, [Accumulation(micro, None, sample) for micro in micros])


def test_a_backward_that_somebody_waits_for_keeps_its_place() -> None:
    step = StepInProgress([Backward(7, 70), Backward(8, 80), Backward(9, 90)], {"a": history(0, 1, 2), "b": history(1)})
    assert step.keep({"b"}) == [7, 9]
    assert set(step.histories) == {"b"}
    assert [backward.discarded for backward in step.backwards] == [True, False, True]
    assert step.micro(80) == 1
    assert step.micro(100) is None
    assert step.keep({"b"}) == []  # nothing new
    assert step.keep(()) == [8]
    assert step.backwards == []
    assert step.histories == {}


def test_clearing_names_each_backward_once() -> None:
    step = StepInProgress([Backward(7, 70), Backward(8, 80)], {"a": history(0), "b": history(1)})
    assert step.keep({"b"}) == [7]
    assert step.clear() == [8]
    assert step.clear() == []
