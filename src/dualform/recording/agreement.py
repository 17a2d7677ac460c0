"""What processes that train together tell each other before a step, so that none of them waits for another in vain.

Every exchange carries whether a process has failed. What a process computes between two exchanges it computes inside of
the later one: if that fails, the others hear of it, and all of them refuse the step together.
"""

import contextlib
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualform.errors import RefusedError
from dualform.recording.divided import OwnRows
from dualform.recording.probes import Float64Array, as_float64
from dualform.recording.world import World

ELSEWHERE = "Another process of this training cannot record this step, as its own error says; so no process records it."


def sum_numbers(world: World, count: int, find: Callable[[], npt.ArrayLike]) -> Float64Array:
    """Return the sum of numbers over all processes, (count,), or raise where finding them failed in any process.

    Args:
        world: the processes, of which all have to call this.
        count: how many numbers there are, the same in every process.
        find: returns this process's numbers.
    """
    mine = np.zeros(count + 1)
    failure: Exception | None = None
    try:
        mine[:count] = find()
    except Exception as error:
        mine[:] = 0.0
        mine[count] = 1.0
        failure = error
    total: Float64Array = world.sum(torch.from_numpy(mine)).numpy()
    if failure is not None:
        raise failure
    if total[count]:
        raise RefusedError(ELSEWHERE)
    return total[:count]


def gather_numbers(world: World, count: int, find: Callable[[], npt.ArrayLike]) -> Float64Array:
    """Return the numbers of every process, (processes, count), or raise where finding them failed in any process."""

    def placed() -> Float64Array:
        every = np.zeros((world.size, count))
        every[world.rank] = find()
        return every.reshape(-1)

    return sum_numbers(world, world.size * count, placed).reshape(world.size, count)


class JointWork:
    """What every process does with exchanges of large tensors in between, in a with statement.

    Where it fails in one process, the others hear of it at their next exchange, or at the end, and raise too.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._heard: RefusedError | None = None  # raised because another process has failed

    def __enter__(self) -> Self:
        self._heard = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.agree()
        elif isinstance(error, Exception) and error is not self._heard:
            with contextlib.suppress(RuntimeError):  # of a process that is gone, as the error itself may tell
                self.world.any(True)

    def agree(self) -> None:
        """Return if no process has failed so far, else raise; every process calls this before each exchange."""
        if self.world.any(False):
            self._heard = RefusedError(ELSEWHERE)
            raise self._heard


def join_samples(world: World, own_rows: Mapping[str, OwnRows]) -> dict[str, Tensor]:
    """Return the samples of whole parameters that are divided by rows, put together from the rows of all processes."""
    if not own_rows:
        return {}
    counts = [rows.sample_count for rows in own_rows.values()]

    def place_own() -> Float64Array:
        found = [np.zeros(count) for count in counts]
        for numbers, rows in zip(found, own_rows.values(), strict=True):
            place, mine = rows.whole_sample()
            numbers[place : place + len(mine)] = as_float64(mine)
        return np.concatenate(found)

    total = sum_numbers(world, sum(counts), place_own)
    parts = torch.from_numpy(total).split(counts)
    return {name: part.to(rows.dtype) for (name, rows), part in zip(own_rows.items(), parts, strict=True)}
