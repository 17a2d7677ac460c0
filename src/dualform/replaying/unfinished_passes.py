"""What the passes of a question know at a restart point, kept so that a replay that was killed goes on from there.

The states of a pass's reducer are tensors; they lie in the run's cache under the names of the passes, the last ones
alone. A question that is asked again takes them up where a restart point of the training is kept, too.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dualform.engine.jobs import Pass
from dualform.replaying.job_names import name_job, pack_answer, unpack_answer
from dualform.replaying.replayed_patterns import ReplayedPatterns

STEP = "step"


class UnfinishedPasses:
    """The states of the passes that one replay answers."""

    def __init__(self, source: ReplayedPatterns, jobs: Sequence[Pass[Any]]) -> None:
        self._source = source
        self._jobs = jobs
        names = [name_job(job) for job in jobs]
        alone = source.description.processes == 1  # several processes would have to have come equally far
        known = alone and source.is_restartable and bool(names) and None not in names
        self._what = ("unfinished", *names) if known else None

    def find(self) -> tuple[int, list[Any]] | None:
        """Return the step at which an earlier replay of these passes can be gone on with, and their states there."""
        packed = None if self._what is None else self._source.answers.find(self._what)
        if packed is None:
            return None
        step = int(packed[STEP])
        if self._source.restart_points().before(step)[0] != step:
            return None
        return step, [self._unpack(packed, place) for place in range(len(self._jobs))]

    def keep(self, step: int, states: Sequence[Any]) -> None:
        """Keep the states of the passes after so many steps, where all of them can be kept."""
        if self._what is None:
            return
        packed: dict[str, Tensor] = {STEP: torch.tensor(step)}
        for place, state in enumerate(states):
            found = pack_answer(state)
            if found is None:
                return
            packed |= {f"{place} {name}": tensor.clone() for name, tensor in found.items()}
        self._source.answers.keep(self._what, packed)

    def _unpack(self, packed: dict[str, Tensor], place: int) -> Any:
        prefix = f"{place} "
        mine = {name.removeprefix(prefix): tensor for name, tensor in packed.items() if name.startswith(prefix)}
        return unpack_answer(mine, self._jobs[place].like.device)
