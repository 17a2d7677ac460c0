"""The executor inside a training of several processes (torch.distributed): each reads some parts, for all of them.

Every process asks its own questions, in the same order as the others. The questions of all are exchanged, each process
finds what its parts add to every one of them, the states are exchanged, and each process merges those of its own
questions. `part_states.py` cuts and merges, so that answers are the same to the bit for any number of processes.
"""

from collections.abc import Sequence
from typing import Any

from dualform.engine.jobs import Fold, Job, Sweep
from dualform.engine.part_states import (
    HeldKeys,
    folds_by_parameter,
    folds_joined,
    merged,
    part_states,
    pieces_of,
    receive_job,
    require_cpu,
    run_onlookers_here,
    run_whole,
    send_job,
    without_codes,
)
from dualform.engine.source import PatternSource
from dualform.errors import DualformError, QueryError

HELD_BYTES = 4 << 30  # of keys that a process keeps in memory between questions


class DistributedExecutor:
    """Runs jobs on the processes of the default process group, or of another one.

    Args:
        group: a process group of torch.distributed whose backend takes tensors of the CPU, such as gloo.
        held_bytes: how many bytes of keys each process may keep in memory.
    """

    def __init__(self, group: Any = None, *, held_bytes: int = HELD_BYTES) -> None:
        self._group = group
        self._held = HeldKeys(held_bytes)

    def run(self, source: PatternSource, jobs: Sequence[Job]) -> list[Any]:
        """Return the result of each job. Every process of the group has to call this, as often as the others."""
        return run_onlookers_here(self._run, source, jobs)

    def _run(self, source: PatternSource, jobs: Sequence[Job]) -> list[Any]:
        """Return the result of each job, of which this process finds its own part."""
        rank, size = self._place()
        failure: DualformError | None = None
        sent: list[tuple[bytes, Any]] = []
        try:
            require_cpu(jobs)
            sent = _sent(source, jobs)
        except DualformError as error:  # the others wait, and hear of it
            failure = error
        asked: list[tuple[str, list[tuple[bytes, Any]]]] = self._gathered((source.digest, sent))
        answers: Any = None
        try:
            if failure is None:
                answers = [_answered(source, questions, rank, size, self._held) for _, questions in asked]
                if any(digest != source.digest for digest, _ in asked):
                    raise QueryError("The processes have opened different runs, or one that grew. Open the same one.")
        except DualformError as error:
            failure = error
        found = self._gathered((failure, answers))
        if failures := [error for error, _ in found if error is not None]:
            raise failures[0]
        return _joined(jobs, [mine[rank] for _, mine in found])

    def _place(self) -> tuple[int, int]:
        import torch.distributed

        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            raise QueryError(
                'executor="distributed" is for processes that train together: call torch.distributed.'
                'init_process_group first, or ask with executor="local".'
            )
        return torch.distributed.get_rank(self._group), torch.distributed.get_world_size(self._group)

    def _gathered(self, mine: Any) -> list[Any]:
        """Return what every process has given, in the order of ranks."""
        import torch.distributed

        found: list[Any] = [None] * torch.distributed.get_world_size(self._group)
        torch.distributed.all_gather_object(found, mine, group=self._group)
        return found


def _sent(source: PatternSource, jobs: Sequence[Job]) -> list[tuple[bytes, Any]]:
    """Return the questions of one process: a pass with its pieces, a sweep, or the folds of one parameter."""
    sent: list[tuple[bytes, Any]] = []
    for job in jobs:
        if isinstance(job, Sweep):
            sent.append((send_job(source, job), None))
        elif not isinstance(job, Fold):
            sent.append((send_job(source, without_codes(job)), pieces_of(source, job)))
    for folds in folds_by_parameter(jobs).values():
        sent += [(send_job(source, fold), None) for fold in folds]
    return sent


def _answered(
    source: PatternSource, questions: Sequence[tuple[bytes, Any]], rank: int, size: int, held: HeldKeys
) -> list[Any]:
    """Return what one process of `size` finds for the questions of another: states of its parts, or whole results."""
    order = {part.index: number for number, part in enumerate(source.parts())}
    found: list[Any] = []
    for number, (content, pieces) in enumerate(questions):
        if pieces is not None:
            mine = [piece for piece in pieces if order[piece.index] % size == rank]
            found.append(dict(part_states(source, receive_job(source, content), mine, held)) if mine else {})
        else:
            found.append(run_whole(source, [receive_job(source, content)])[0] if number % size == rank else None)
    return found


def _joined(jobs: Sequence[Job], found: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the result of each job from what every process found for them."""
    gathered = zip(*found, strict=True)
    results: dict[int, Any] = {}
    for place, job in enumerate(jobs):
        if isinstance(job, Fold):
            continue
        mine = next(gathered)
        if isinstance(job, Sweep):
            results[place] = next(each for each in mine if each is not None)
        else:
            results[place] = merged(job, {index: state for states in mine for index, state in states.items()})
    folds = folds_by_parameter(jobs)
    folded = folds_joined(
        jobs, {name: [next(e for e in next(gathered) if e is not None) for _ in mine] for name, mine in folds.items()}
    )
    return [next(folded) if isinstance(job, Fold) else results[place] for place, job in enumerate(jobs)]
