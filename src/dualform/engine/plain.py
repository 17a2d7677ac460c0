"""The plain executor: one pattern range after the other, no shortcut. Every other executor must give its answers."""

from collections.abc import Sequence
from typing import Any

import torch

from dualform.engine.fold import run_folds
from dualform.engine.jobs import Fold, Job, Pass, Sweep
from dualform.engine.reading import BlockReader, pattern_ranges
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
        horizon, device = job.view.horizon, job.like.device
        reader = BlockReader(
            source,
            job.layer,
            horizon=horizon,
            values=job.needs_values,
            of=job.coefficients_of,
            device=device,
            dtype=job.dtype,
        )
        nothing = torch.empty(0, device=device)
        states: dict[int, Any] = {}
        size = job.block_patterns or 1024
        for wanted in pattern_ranges(source, job.layer, horizon=horizon, mask=job.view.mask, size=size):
            block = reader.read(wanted)
            measured = nothing if job.measure is None or job.queries is None else job.measure(job.queries, block)
            groups_of = one_group(len(wanted), device) if job.groups is None else job.groups.of(wanted, device)
            assert wanted.part is not None, "these ranges lie in parts"
            state = states.get(wanted.part.index)
            state = job.new_state() if state is None else state
            states[wanted.part.index] = job.reducer.add(state, block, measured, groups_of)
        total = job.new_state()
        for index in sorted(states):
            total = job.reducer.merge(total, states[index])
        return job.reducer.result(total)
