"""The shards of several processes that recorded one run together, joined: parts with the patterns of all of them.

A part is a range of steps that lies within one shard of each process that took part. Its calls are in the order of
steps, and within a step in the order of ranks; keys and values stay in the processes' own files, and are gathered when
they are taken.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from dualform.engine.source import PatternPart, Rows
from dualform.store.checked_tables import count_rows
from dualform.store.manifest import Manifest, ShardEntry
from dualform.store.shard_reading import CallColumns, Shard

Ints = npt.NDArray[np.int64]


def published_steps(manifests: Sequence[Manifest | None]) -> int:
    """Return how many steps all processes that took part in them have published.

    Args:
        manifests: of the processes, in the order of ranks; None where a process has published none yet.
    """
    first = manifests[0]
    assert first is not None, "process 0 has the manifest of the run"
    segments = first.processes
    ends = [begin for begin, _ in segments[1:]] + [None]
    steps = 0
    for (begin, count), end in zip(segments, ends, strict=True):
        steps = min(_reach(one.shards if one is not None else (), begin) for one in manifests[:count])
        if end is None or steps < end:
            return steps
        steps = end
    return steps


def cut_shards(manifest: Manifest, steps: int) -> Manifest:
    """Return a manifest without the steps from `steps` on; shares that are kept after later steps are left out."""
    kept = [shard for shard in manifest.shards if shard.start < steps]
    if kept and kept[-1].stop > steps:
        kept[-1] = dataclasses.replace(kept[-1], stop=steps, parameters={})
    shares = manifest.shares
    if shares is not None:
        horizons = tuple(horizon for horizon in shares.horizons if horizon <= steps)
        state, earlier = (one if one in horizons else None for one in (shares.state, shares.earlier_state))
        shares = dataclasses.replace(shares, horizons=horizons, state=state, earlier_state=earlier)
    return dataclasses.replace(manifest, shards=tuple(kept), shares=shares)


def _reach(shards: Sequence[ShardEntry], step: int) -> int:
    """Return the first step from `step` on that no shard holds."""
    for shard in shards:
        if shard.start <= step < shard.stop:
            step = shard.stop
    return step


def join_shards(
    by_rank: Sequence[Sequence[Shard]], processes: Sequence[tuple[int, int]], steps: int
) -> list["JoinedPart"]:
    """Return the parts of a run of several processes, in the order of steps.

    Args:
        by_rank: each process's shards, in the order of ranks.
        processes: from which step on how many processes took part.
        steps: how many steps the run has.
    """
    edges = {0, steps, *(first for first, _ in processes)}
    edges |= {edge for shards in by_rank for shard in shards for edge in (shard.start, shard.stop)}
    inner = sorted(edge for edge in edges if edge <= steps)
    found: list[JoinedPart] = []
    for start, stop in pairwise(inner):
        count = next(count for first, count in reversed(processes) if first <= start)
        here = [
            (rank, next(shard for shard in by_rank[rank] if shard.start <= start < shard.stop)) for rank in range(count)
        ]
        found.append(JoinedPart(len(found), start, stop, here))
    return found


@dataclass(frozen=True, slots=True)
class _JoinedCalls:
    """The calls of a layer in a part, and where their patterns lie.

    Attributes:
        columns: the calls, in the order of steps and ranks.
        process: (n,) the place of each call's process among those of the part.
        offsets: (n,) the place of each call's first pattern among those of its layer in the process's shard.
    """

    columns: CallColumns
    process: Ints
    offsets: Ints


class JoinedPart(PatternPart):
    """The patterns of a range of steps that several processes recorded."""

    def __init__(self, index: int, start: int, stop: int, shards: Sequence[tuple[int, Shard]]) -> None:
        """Join the shards of some processes, each given with its rank, in a range of steps that all of them hold."""
        self.index, self.start, self.stop = index, start, stop
        self._shards = shards
        self._calls: dict[str, _JoinedCalls] = {}

    def calls(self, layer: str) -> CallColumns:
        """Return the calls of a layer, in the order of steps and ranks."""
        return self._joined(layer).columns

    def _joined(self, layer: str) -> _JoinedCalls:
        if layer not in self._calls:
            tables: list[CallColumns] = []
            process: list[Ints] = []
            annotated = 0  # rows of the annotation tables of the processes before
            for place, (rank, shard) in enumerate(self._shards):
                table = shard.calls(layer)
                first, last = np.searchsorted(table["step"], [self.start, self.stop]).tolist()
                mine = {name: column[first:last] for name, column in table.items()}
                mine["rank"] = np.full(last - first, rank)
                offset = mine["annotation_offset"]
                mine["annotation_offset"] = np.where(offset < 0, offset, offset + annotated)
                tables.append(mine)
                process.append(np.full(last - first, place))
                annotated += count_rows(shard.blob("annotations"))
            columns = {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}
            order = np.argsort(columns["step"], kind="stable")
            columns = {name: column[order] for name, column in columns.items()}
            sizes = columns["rows"] * columns["positions"]
            offsets, columns["offset"] = columns["offset"], np.cumsum(sizes) - sizes
            self._calls[layer] = _JoinedCalls(columns, np.concatenate(process)[order], offsets)
        return self._calls[layer]

    def rows(self, layer: str, what: Literal["keys", "values"]) -> Rows:
        """Return the keys or values of a layer, in the order of its calls."""
        joined = self._joined(layer)
        there = sorted(set(joined.process.tolist()))
        return JoinedRows(joined, {place: self._shards[place][1].rows(layer, what) for place in there})

    def annotation(self, name: str, *, keep: bool = True) -> pa.ChunkedArray | None:
        """Return one of the user's columns of all processes; nulls where a process has none of it."""
        columns = [shard.annotation(name, keep=keep) for _, shard in self._shards]
        kinds = {column.type for column in columns if column is not None}
        if not kinds:
            return None
        kind = kinds.pop() if len(kinds) == 1 else joined_type(kinds)
        chunks: list[pa.Array] = []
        for column, (_, shard) in zip(columns, self._shards, strict=True):
            if column is None:
                chunks.append(pa.nulls(count_rows(shard.blob("annotations")), kind))
            else:
                chunks.extend(column.cast(kind, safe=False).chunks)
        return pa.chunked_array(chunks, kind)

    def key_range(self, layer: str) -> tuple[float, float] | None:
        """Return the least and the greatest element of a layer's keys, as the manifests have it."""
        ranges = [found for _, shard in self._shards if (found := shard.key_range(layer)) is not None]
        return (min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else None

    def key_bytes(self, layer: str) -> int:
        """Return about how many bytes a layer's keys take in memory, of all steps of the processes' shards."""
        return sum(shard.key_bytes(layer) for _, shard in self._shards)

    def stored_bytes(self, layer: str) -> int:
        """Return about how many bytes a layer's patterns take in the files of all processes."""
        total = 0.0
        counts = np.bincount(
            self._joined(layer).process,
            weights=self.calls(layer)["rows"] * self.calls(layer)["positions"],
            minlength=len(self._shards),
        )
        for count, (_, shard) in zip(counts, self._shards, strict=True):
            total += shard.stored_bytes(layer) * count / max(1, shard.count(layer))
        return int(total)


class JoinedRows:
    """Keys or values of a layer that lie in the files of several processes."""

    def __init__(self, calls: _JoinedCalls, rows: dict[int, Rows]) -> None:
        """Join rows.

        Args:
            calls: the layer's calls in a part.
            rows: the rows of the processes that have calls, by their places in the part.
        """
        self._process, self._offsets = calls.process, calls.offsets
        self._starts = calls.columns["offset"]
        sizes = calls.columns["rows"] * calls.columns["positions"]
        self._ends = self._starts + sizes
        self._rows = rows

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which rows are stored."""
        return next(iter(self._rows.values())).dtype

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def take(self, index: slice | Tensor, into: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return some rows as they are stored, and their scales where they are row-scaled."""
        wanted = np.arange(len(self))[index] if isinstance(index, slice) else index.numpy()
        at = np.searchsorted(self._ends, wanted, side="right")
        process, places = self._process[at], self._offsets[at] + wanted - self._starts[at]
        if len(wanted) and (process == process[0]).all():
            return self._rows[int(process[0])].take(_index(places), into)
        found: tuple[Tensor, Tensor | None] | None = None
        for place, rows in self._rows.items():
            here = np.flatnonzero(process == place)
            if not len(here) and len(wanted):
                continue
            stored, scales = rows.take(_index(places[here]))
            if found is None:
                found = (
                    stored.new_empty(len(wanted), *stored.shape[1:]),
                    None if scales is None else scales.new_empty(len(wanted)),
                )
            found[0][torch.from_numpy(here)] = stored
            if scales is not None and found[1] is not None:
                found[1][torch.from_numpy(here)] = scales
        assert found is not None, "rows are asked for where a process has some"
        return found


def _index(places: Ints) -> slice | Tensor:
    """Return places as a slice where they follow each other."""
    if not len(places):
        return slice(0, 0)
    first, last = int(places[0]), int(places[-1])
    if last - first + 1 == len(places) and (np.diff(places) == 1).all():
        return slice(first, last + 1)
    return torch.from_numpy(places)


def join_columns_of(manifests: Sequence[Manifest]) -> dict[str, str]:
    """Return the user's columns of all processes, and the types that values of all of them fit into."""
    found: dict[str, str] = {}
    for manifest in manifests:
        for name, kind in manifest.columns.items():
            both = {pa.type_for_alias(kind), pa.type_for_alias(found.get(name, kind))}
            found[name] = str(both.pop() if len(both) == 1 else joined_type(both))
    return found


def joined_type(kinds: set[pa.DataType]) -> pa.DataType:
    """Return the type that values of several types fit into: numbers of both types are floating-point ones."""
    return pa.float64() if kinds <= {pa.int64(), pa.float64()} else pa.string()
