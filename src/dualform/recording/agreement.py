"""What processes that train together tell each other before a step, so that none of them waits for another in vain.

Every exchange carries whether a process has failed. What a process computes between two exchanges it computes inside of
the later one: if that fails, the others hear of it, and all of them refuse the step together.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from dualform.errors import RefusedError
from dualform.recording.probes import Float64Array
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
