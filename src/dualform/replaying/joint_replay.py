"""Several processes run their training again together: each its own part, and the patterns of all go to all.

As many processes as recorded the run, under torchrun for example, have to ask the same questions in the same order.
After every step each of them proves its own calls and parameters, and they exchange the patterns that the question
needs: so each sees the patterns of all, in the order of ranks, and finds the whole answer. What fails in one process
goes with the exchange, so that all of them end the replay together.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from dualform.engine.source import DerivedSums
from dualform.errors import DualformError, ReplayError
from dualform.recording.world import OneProcess, World
from dualform.store.reader import Run

T = TypeVar("T")
_GONE = "Another process that runs this training again has ended, as its own error says; so the replay ends here too."


class UnsureRowsError(ReplayError):
    """A step differs in calls or annotations, maybe only because the layers' rows were not tried again."""


def processes_here() -> int:
    """Return how many processes torch.distributed has, this one among them; 1 where it is not used."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 1
    return torch.distributed.get_world_size()


def find_replaying_world(run: Run) -> World:
    """Wait for the processes that run a training again together, as many as recorded it; refuse any other number.

    A training of one process is run again by each process alone, whatever the program around it does.
    """
    recorded, here = run.description.processes, processes_here()
    if recorded == 1:
        return OneProcess()
    if here != recorded:
        raise ReplayError(
            f"{recorded} processes recorded {run.name} together, and as many have to run their training again: "
            f"torch.distributed has {here if here > 1 else 'only this one'} here. Start the program that asks with "
            f"torchrun --nproc_per_node {recorded}, call torch.distributed.init_process_group before it asks, and let "
            "every process ask the same."
        )
    from dualform.recording.process_group import ProcessGroup  # which needs torch.distributed

    return ProcessGroup(
        purpose="is about to run a training again",
        remedy="All processes that recorded a training run it again together: ask the same questions in all of them, "
        "in the same order.",
    )


def exchange(world: World, find: Callable[[], T]) -> list[T]:
    """Return what every process has found, in the order of ranks; raise in all of them where one has failed."""
    if world.size == 1:
        return [find()]
    found: list[T] = []
    failure: Exception | None = None
    try:
        found.append(find())
    except Exception as error:
        failure = error
    mine = None if failure is None else (isinstance(failure, UnsureRowsError), _text(failure))
    try:
        told = world.gather((mine, found))
    except RuntimeError as error:
        raise failure or ReplayError(_GONE) from error
    failures = {rank: problem for rank, (problem, _) in enumerate(told) if problem is not None}
    if not failures:
        return [one for _, (one,) in told]
    if failure is not None and len(set(failures.values())) == 1:
        raise failure
    # All of them have to take it for the same: rows are tried again only where that may help every process.
    kind = UnsureRowsError if all(unsure for unsure, _ in failures.values()) else ReplayError
    raise kind(" ".join(f"Process {rank}: {text}" for rank, (_, text) in failures.items())) from failure


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, DualformError) else f"{type(error).__name__}: {error}"


def require_same_question(world: World, question: str) -> None:
    """Refuse, in all processes, a replay for which they do not ask the same."""
    if len(set(exchange(world, lambda: question))) > 1:
        raise ReplayError(
            "The processes that run this training again ask for different things. Open the same run and ask the same "
            "questions in all of them, in the same order."
        )


def alone(rows: Tensor) -> Tensor:
    """Return a copy of rows in the CPU's memory that can be sent: a view would bring all of its memory along."""
    return rows.detach().cpu().clone(memory_format=torch.contiguous_format)


class SumsOfProcesses:
    """Derived sums of a run of several processes.

    Whether a sum is read or found by a replay has to be the same in all processes that ask together: they read none,
    and process 0 keeps what they find. A process that asks alone reads them, since it cannot replay.
    """

    def __init__(self, sums: DerivedSums) -> None:
        self._sums = sums

    def load(self, name: str) -> dict[str, Tensor] | None:
        """Return the tensors that were saved under a name, in a process that asks alone."""
        return self._sums.load(name) if processes_here() == 1 else None

    def save(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Save tensors under a name; one process does so for all."""
        if processes_here() == 1 or torch.distributed.get_rank() == 0:
            self._sums.save(name, tensors)


def common_start(world: World, before: Callable[[int], int], step: int) -> int:
    """Return the last step, up to a given one, at which all processes can start.

    Args:
        world: the processes.
        before: returns the last step up to a given one at which this process can start.
        step: the given step.
    """
    while True:
        starts: Sequence[int] = exchange(world, partial(before, step))
        step = min(starts)
        if max(starts) == step:
            return step
