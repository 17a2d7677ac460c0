"""The course of a training run: how large its errors were, and where epochs and tasks began. No query is involved."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dualform.attend.groups import Table
from dualform.store.stream import stream


@dataclass(frozen=True, slots=True)
class Course:
    """What happened along the steps.

    Attributes:
        edges: (B + 1,) the first step of each bin, and the number of steps.
        errors: (B,) the mean norm of the last layer's values, relative to the largest bin; nothing for keys only.
            It falls as the loss falls, which is not recorded.
        epochs: the steps at which some sample came for the second, third, ... time.
        tasks: (step, task) wherever the `task` column changed.
    """

    edges: npt.NDArray[np.int64]
    errors: npt.NDArray[np.float64] | None
    epochs: tuple[int, ...]
    tasks: tuple[tuple[int, Any], ...]


def follow(table: Table, *, width: int) -> Course:
    """Follow a run in bins of `width` steps."""
    run, steps = table.run, table.horizon
    edges = np.append(np.arange(0, max(steps, 1), width), steps).astype(np.int64)
    last = list(run.layers)[-1]
    columns = run.manifest.columns
    wanted = [name for name in ("sample", "task") if name in columns]
    rows = table.rows(last, ["step", *wanted])
    step = np.asarray(rows["step"], dtype=np.int64)
    epochs = _epochs(step, _numbered(rows["sample"])) if "sample" in wanted and len(step) else ()
    tasks = _changes(step, rows["task"].to_pylist()) if "task" in wanted and len(step) else ()
    return Course(edges, _errors(table, last, len(edges) - 1, width), epochs, tasks)


def _numbered(column: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """Return the number of each entry's value among the distinct values of a column; -1 where there is none."""
    return np.asarray(column.combine_chunks().dictionary_encode().indices.fill_null(-1), dtype=np.int64)


def _errors(table: Table, layer: str, bins: int, width: int) -> npt.NDArray[np.float64] | None:
    run = table.run
    if run.layer(layer).store == "keys" or not run.count(layer):
        return None
    sums, counts = np.zeros(bins), np.zeros(bins)
    step = np.concatenate([shard.addresses(layer)["step"] for shard in run.shards])
    for chunk in stream(run, layer, horizon=table.horizon, values=True):
        assert chunk.values is not None, "values were asked for"
        at = step[chunk.patterns] // width
        sums += np.bincount(at, weights=chunk.values.double().norm(dim=1).numpy(), minlength=bins)
        counts += np.bincount(at, minlength=bins)
    means = sums / np.maximum(counts, 1)
    return means / means.max() if means.max() > 0 else means


def _epochs(step: npt.NDArray[np.int64], sample: npt.NDArray[np.int64]) -> tuple[int, ...]:
    """Return the first step at which some sample is seen for the second time, the third, and so on."""
    order = np.lexsort((step, sample))
    kept, at = sample[order], step[order]
    starts = np.flatnonzero(np.append(True, kept[1:] != kept[:-1]))
    turn = np.arange(len(kept)) - np.repeat(starts, np.diff(np.append(starts, len(kept))))
    first = np.full(int(turn.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, turn[kept != -1], at[kept != -1])
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
