"""The processes of a group of torch.distributed, as a recorder's world.

What processes tell each other here is small and in the CPU's memory, so it goes over a group of its own, of the backend
gloo, whatever the training uses: it never comes between the collectives of the training.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dualform.errors import RefusedError

T = TypeVar("T")
ARRIVAL_SECONDS = 300.0
"""How long a process waits for all others to make their recorders."""
CLOSING_SECONDS = 60.0
"""How long a process that has closed its recording waits for the others to close theirs."""

RECORD_IN_ALL = (
    "Each of the processes that train together has its own patterns: call dualform.record in all of them, with the "
    "same folder."
)

_groups: dict[tuple[int, ...], tuple[Any, Any]] = {}
"""Global ranks -> the default group of the time, and the group of these ranks over gloo; kept for later recordings."""
_made: dict[tuple[tuple[int, ...], str], int] = {}
"""Global ranks and a purpose -> how many worlds of them this process has made for it."""


class ProcessGroup:
    """The processes of a group that train one model together; every process has to make its own `ProcessGroup`.

    Attributes:
        rank: the number of this process in the group.
        size: the number of processes.
    """

    def __init__(self, group: Any = None, *, purpose: str = "records", remedy: str = RECORD_IN_ALL) -> None:
        """Wait for the other processes of a group, by default of the default group, and make a way to talk to them.

        Args:
            group: a process group of torch.distributed.
            purpose: what the processes come together for, in words, as what one of them does.
            remedy: what to do where some of them do not come.
        """
        ranks = tuple(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))
        _await_all(ranks, purpose, remedy)
        self._ranks, self._training = ranks, group
        self._there: Any = None  # a group that exchanges what lies on a GPU
        self._group = _gloo_group(ranks)
        self.rank = dist.get_rank(self._group)
        self.size = len(ranks)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes, in the CPU's memory."""
        total = tensor.detach().cpu().clone()
        dist.all_reduce(total, group=self._group)
        return total

    def any(self, flag: bool) -> bool:
        """Say whether the flag is set in any process."""
        return bool(self.sum(torch.tensor(int(flag))))

    def gather(self, value: T) -> list[T]:
        """Return the value of every process, in the order of their ranks."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._group)
        return found

    def exchange(self, outgoing: Tensor, sizes: Sequence[int], incoming: Sequence[int]) -> Sequence[Tensor]:
        """Return what every process sends to this one, in the order of ranks, on the device where it lies."""
        found = outgoing.new_empty(sum(incoming))
        group = self._group_on(outgoing.device)
        dist.all_to_all_single(found, outgoing, list(incoming), list(sizes), group=group)
        parts: list[Tensor] = list(found.split(list(incoming)))
        return parts

    def _group_on(self, device: torch.device) -> Any:
        """Return the group that exchanges what lies on a device; on a GPU one of the training's backend."""
        if device.type == "cpu":
            return self._group
        if self._there is None:
            backend = dist.get_backend(self._training)
            self._there = dist.new_group(
                list(self._ranks), backend=backend, use_local_synchronization=True, group_desc="dualform"
            )
        return self._there

    def barrier(self) -> None:
        """Return when every process has come here, when one has ended, or when some have not come for a minute."""
        try:
            dist.all_reduce(torch.zeros(1), group=self._group, async_op=True).wait(timedelta(seconds=CLOSING_SECONDS))
        except RuntimeError:
            _groups.pop(self._ranks, None)  # in which an exchange is left open


def _await_all(ranks: tuple[int, ...], purpose: str, remedy: str) -> None:
    """Wait until every process has come here for a purpose as often as this one, or refuse.

    A process would wait for ever later. One that was refused has not come, so that it may come again.
    """
    store = dist.distributed_c10d._get_default_store()
    number = _made.get((ranks, purpose), 0) + 1
    keys = {rank: f"dualform/{','.join(map(str, ranks))}/{purpose}/{number}/{rank}" for rank in ranks}
    mine = keys[dist.get_rank()]
    store.set(mine, "here")
    try:
        store.wait(list(keys.values()), timedelta(seconds=ARRIVAL_SECONDS))
    except RuntimeError as error:
        missing = [rank for rank, key in keys.items() if not store.check([key])]
        store.delete_key(mine)
        raise RefusedError(
            f"Process {dist.get_rank()} {purpose}, and processes {missing} did not come to it within "
            f"{ARRIVAL_SECONDS:.0f} s. {remedy}"
        ) from error
    _made[ranks, purpose] = number


def _gloo_group(ranks: tuple[int, ...]) -> Any:
    """Return a group of some processes over gloo: the one of an earlier recording, or a new one."""
    world = dist.group.WORLD
    known, group = _groups.get(ranks, (None, None))
    if group is None or known is not world:
        group = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True, group_desc="dualform")
        _groups[ranks] = world, group
    return group
