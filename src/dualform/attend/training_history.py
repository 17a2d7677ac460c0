"""The history of a training run: how large its errors were, and where epochs and tasks began. No query is involved."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from dualform.attend.groups import Table
from dualform.binning import Bins
from dualform.engine.block import Block
from dualform.engine.jobs import Pass
from dualform.engine.reducers import Sums


@dataclass(frozen=True, slots=True)
class TrainingHistory:
    """How large the errors of a run were along its steps, and where epochs and tasks began.

    Attributes:
        edges: (B + 1,) the first step of each bin, and the number of steps.
        errors: (B,) the mean norm of the last layer's values, relative to the largest bin; nothing for keys only,
            and nothing, neither epochs nor tasks, where no patterns are kept. It falls as the loss falls, which is not
            recorded.
        epochs: the steps at which some sample came for the second, third, ... time.
        tasks: (step, task) wherever the `task` column changed.
    """

    edges: npt.NDArray[np.int64]
    errors: npt.NDArray[np.float64] | None
    epochs: tuple[int, ...]
    tasks: tuple[tuple[int, Any], ...]


def find_training_history(table: Table, *, width: int) -> TrainingHistory:
    """Return the history of a run in bins of `width` steps."""
    run, steps = table.run, table.horizon
    edges = np.append(np.arange(0, max(steps, 1), width), steps).astype(np.int64)
    last = list(run.layers)[-1]
    if table.keeps_shares(last):
        return TrainingHistory(edges, None, (), ())
    columns = run.description.columns
    wanted = [name for name in ("sample", "task") if name in columns]
    rows = table.rows(last, ["step", *wanted])
    step = np.asarray(rows["step"], dtype=np.int64)
    epochs = _epochs(step, _numbered(rows["sample"])) if "sample" in wanted and len(step) else ()
    tasks = _changes(step, rows["task"].to_pylist()) if "task" in wanted and len(step) else ()
    return TrainingHistory(edges, _errors(table, last, len(edges) - 1, width), epochs, tasks)


def _numbered(column: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """Return the number of each entry's value among the distinct values of a column; -1 where there is none."""
    return np.asarray(column.combine_chunks().dictionary_encode().indices.fill_null(-1), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class ValueNorms(Sums):
    """The sum of the values' norms and the number of patterns, per group, (2, G)."""

    groups: int

    def new(self, like: Tensor) -> Tensor:
        """Return zeros, (2, G)."""
        return torch.zeros(2, self.groups, dtype=torch.float64, device=like.device)

    def add(self, state: Tensor, block: Block, measures: Tensor, groups_of: Tensor) -> Tensor:
        """Add the norms of a block's values by group."""
        assert block.values is not None, "this pass reads values"
        norms = block.values.double().norm(dim=1)
        return state.index_add_(1, groups_of, torch.stack([norms, torch.ones_like(norms)]))


def _errors(table: Table, layer: str, bins: int, width: int) -> npt.NDArray[np.float64] | None:
    """Return the mean norm of a layer's values in each bin of steps, relative to the largest, (B,)."""
    if table.run.layer(layer).store == "keys" or not table.count(layer):
        return None
    grouping = table.group(layer, Bins("step", width))
    like = torch.empty(0, dtype=table.dtype(layer))
    job = Pass(layer, table, ValueNorms(len(grouping.labels)), like, groups=grouping, values=True)
    sums, counts = table.answer(job).numpy()
    means = np.zeros(bins)
    means[np.asarray(grouping.labels, dtype=np.int64) // width] = sums / counts
    return means / means.max() if means.max() > 0 else means


def _epochs(step: npt.NDArray[np.int64], sample: npt.NDArray[np.int64]) -> tuple[int, ...]:
    """Return the first step at which some sample is seen for the second time, the third, and so on."""
    order = np.lexsort((step, sample))
    samples, at = sample[order], step[order]
    starts = np.flatnonzero(np.append(True, samples[1:] != samples[:-1]))
    turn = np.arange(len(samples)) - np.repeat(starts, np.diff(np.append(starts, len(samples))))
    first = np.full(int(turn.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, turn[samples != -1], at[samples != -1])
    return tuple(int(s) for s in first[1:] if s < np.iinfo(np.int64).max)


def _changes(step: npt.NDArray[np.int64], tasks: list[Any]) -> tuple[tuple[int, Any], ...]:
    """Return where a task begins that was not among those of the step before."""
    by_step: dict[int, set[Any]] = {}
    for at, task in zip(step.tolist(), tasks, strict=True):
        by_step.setdefault(at, set()).add(task)
    found: list[tuple[int, Any]] = []
    before: set[Any] = set()
    for at in sorted(by_step):
        if not by_step[at] & before:
            found += [(at, task) for task in sorted(by_step[at], key=str)]
        before = by_step[at]
    return tuple(found) if len({task for _, task in found}) > 1 else ()
