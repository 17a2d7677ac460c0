"""The processes that train together: one by default, and what a recorder asks them."""

import pytest
import torch

from conformance.sinks import ListSink
from dualform.errors import RefusedError
from dualform.recording.processes import refuse_several_processes
from dualform.recording.recorder import Recorder
from dualform.recording.watch import watch
from dualform.recording.world import OneProcess
from helpers.loops import batches, mlp, sgd, state, train


def test_one_process_is_the_whole_world() -> None:
    world, tensor = OneProcess(), torch.randn(3)
    assert (world.rank, world.size) == (0, 1)
    assert world.sum(tensor) is tensor
    assert (world.any(True), world.any(False)) == (True, False)
    assert world.gather("here") == ["here"]
    world.barrier()


class TwoProcesses(OneProcess):
    """A world whose other process says what the test tells it to."""

    size = 2

    def __init__(self) -> None:
        self.other = False
        self.said: list[bool] = []

    def any(self, flag: bool) -> bool:
        self.said.append(flag)
        return flag or self.other


def test_values_are_recorded_where_the_world_has_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    layers = watch(mlp(), None)
    refuse_several_processes(layers, TwoProcesses())
    refuse_several_processes(watch(mlp(), {"*": "keys"}), OneProcess())
    with pytest.raises(RefusedError, match="one of 2 processes"):
        refuse_several_processes(layers, OneProcess())


def test_a_step_that_another_process_cannot_record_is_refused_here_too() -> None:
    model, world, sink = mlp(), TwoProcesses(), ListSink()
    optimizer = sgd(model)
    with Recorder(model, optimizer, sink, world=world) as recorder:
        train(model, optimizer, batches(2))
        world.other, before = True, state(model)
        with pytest.raises(RefusedError, match="Another process of this training cannot record this step"):
            train(model, optimizer, batches(1))
        torch.testing.assert_close(state(model), before, rtol=0, atol=0)
        world.other = False
        train(model, optimizer, batches(1))
        assert recorder.step == 3
    assert {one.step for one in sink.kept} == {0, 1, 2}
    assert world.said == [False] * 4


def test_a_step_that_is_refused_here_is_told_to_the_others() -> None:
    model, world = mlp(), TwoProcesses()
    optimizer = sgd(model)
    with Recorder(model, optimizer, ListSink(), world=world):
        train(model, optimizer, batches(1))
        model.get_parameter("0.weight").data.add_(1.0)
        with pytest.raises(RefusedError, match="changed between step 1 and step 2"):
            train(model, optimizer, batches(1))
        assert world.said == [False, True]
