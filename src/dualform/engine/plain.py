"""The plain executor: one pattern range after the other, no shortcut. Every other executor must give its answers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dualform.engine.block import Block
from dualform.engine.fold import run_folds
from dualform.engine.jobs import Fold, Job, Pass, Sweep
from dualform.engine.reading import BlockReader, PatternRange, pattern_ranges
from dualform.engine.reducers import one_group
from dualform.engine.source import PatternSource
from dualform.engine.sweep import run_sweep


class PlainExecutor:
    """Runs each job by itself, in order; one state per part, merged from the first part to the last."""

    def run(self, source: PatternSource, jobs: Sequence[Job]) -> list[Any]:
        """Return the result of each job."""
        return [self._run(source, job) for job in jobs]

    def _run(self, source: PatternSource, job: Job) -> Any:
        if isinstance(job, Fold):
            return run_folds(source, [job])[0]
        return run_sweep(source, job) if isinstance(job, Sweep) else self._run_pass(source, job)

    def _run_pass(self, source: PatternSource, job: Pass[Any]) -> Any:
        running = RunningPass(source, job)
        size = job.block_patterns or 1024
        for wanted in pattern_ranges(source, job.layer, horizon=job.view.horizon, mask=job.view.mask, size=size):
            running.take(wanted)
        return running.result()


class RunningPass:
    """A pass at work: takes ranges of patterns in the order of steps; one state per part."""

    def __init__(self, source: PatternSource, job: Pass[Any]) -> None:
        self._job = job
        self._reader = BlockReader(
            source,
            job.layer,
            horizon=job.view.horizon,
            values=job.needs_values,
            of=job.coefficients_of,
            device=job.like.device,
            dtype=job.dtype,
        )
        self._total = job.new_state()
        self._part: int | None = None  # the part whose patterns `_state` is of
        self._state: Any = None

    def take(self, wanted: PatternRange) -> None:
        """Read a range of patterns, measure it, and add it to the state of its part."""
        assert wanted.part is not None, "these ranges lie in parts"
        job = self._job
        block, measured, groups_of = self.measure(wanted)
        if self._part != wanted.part.index:
            self._merge()
            self._part, self._state = wanted.part.index, job.new_state()
        self._state = job.reducer.add(self._state, block, measured, groups_of)

    def measure(self, wanted: PatternRange) -> tuple[Block, Tensor, Tensor]:
        """Read a range of patterns; return them, their measures and their groups."""
        job, device = self._job, self._job.like.device
        block = self._reader.read(wanted)
        nothing = torch.empty(0, device=device)
        measured = nothing if job.measure is None or job.queries is None else job.measure(job.queries, block)
        groups_of = one_group(len(wanted), device) if job.groups is None else job.groups.of(wanted, device)
        return block, measured, groups_of

    def state(self) -> Any:
        """Return the state of all patterns so far; the pass goes on with it."""
        self._merge()
        return self._total

    def go_on(self, state: Any) -> None:
        """Begin with the state of earlier patterns, which another pass of the same question returned."""
        self._total = state

    def result(self) -> Any:
        """Return the answer."""
        self._merge()
        return self._job.reducer.result(self._total)

    def _merge(self) -> None:
        """Add the state of a part that has ended to those of the parts before it."""
        if self._part is not None:
            self._total = self._job.reducer.merge(self._total, self._state)
            self._part, self._state = None, None
