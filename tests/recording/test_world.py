"""The processes that train together: one by default, and what a recorder asks them."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conformance.sinks import ListSink
from dualform.errors import RefusedError
from dualform.recording.agreement import gather_numbers, sum_numbers
from dualform.recording.recorder import Recorder
from dualform.recording.world import OneProcess
from helpers.loops import batches, mlp, sgd, state, train


def test_one_process_is_the_whole_world() -> None:
    world, tensor = OneProcess(), torch.randn(3)
    assert (world.rank, world.size) == (0, 1)
    assert world.sum(tensor) is tensor
    assert (world.any(True), world.any(False)) == (True, False)
    assert world.gather("here") == ["here"]
    world.barrier()


class TwinProcesses(OneProcess):
    """A world of two processes that do the same, of which the other one may fail."""

    size = 2

    def __init__(self) -> None:
        self.fails = False
        self.failed: list[float] = []  # what this process said of its own failure in each exchange

    def sum(self, tensor: Tensor) -> Tensor:
        beside = tensor.numel() == 11  # the numbers of both, beside each other
        total = torch.cat([tensor[:5], tensor[:5], 2 * tensor[10:]]) if beside else 2 * tensor
        self.failed.append(float(tensor[-1]))
        total[-1] += self.fails
        return total

    def gather(self, value: Any) -> list[Any]:
        return [value, value]


def test_a_step_that_another_process_cannot_record_is_refused_here_too() -> None:
    model, world, sink = mlp(), TwinProcesses(), ListSink()
    optimizer = sgd(model)
    with Recorder(model, optimizer, sink, world=world) as recorder:
        train(model, optimizer, batches(2))
        world.fails, before = True, state(model)
        with pytest.raises(RefusedError, match="Another process of this training cannot record this step"):
            train(model, optimizer, batches(1))
        torch.testing.assert_close(state(model), before, rtol=0, atol=0)
        world.fails = False
        train(model, optimizer, batches(1))
        assert recorder.step == 3
    assert {one.step for one in sink.kept} == {0, 1, 2}
    assert not any(world.failed)


def test_a_step_that_is_refused_here_is_told_to_the_others() -> None:
    model, world = mlp(), TwinProcesses()
    optimizer = sgd(model)
    with Recorder(model, optimizer, ListSink(), world=world):
        train(model, optimizer, batches(1))
        assert not any(world.failed)
        model.get_parameter("0.weight").data.add_(1.0)
        with pytest.raises(RefusedError, match="changed between step 1 and step 2"):
            train(model, optimizer, batches(1))
        assert world.failed[-1] == 1.0


def test_numbers_of_all_processes() -> None:
    world = TwinProcesses()
    assert sum_numbers(world, 2, lambda: [1.0, 3.0]).tolist() == [2.0, 6.0]
    assert gather_numbers(world, 5, lambda: np.arange(5)).tolist() == [[0, 1, 2, 3, 4]] * 2
    with pytest.raises(ZeroDivisionError):
        sum_numbers(world, 2, lambda: [1 / 0])
    assert world.failed == [0.0, 0.0, 1.0]
