"""From annotations to masks and groups: which patterns a condition keeps, and which share a value.

Conditions are keyword equality (plain Arrow) or SQL text (DuckDB, on one registered table, with external access off).
Both see a pattern's address (pattern, step, micro, call, row, position) and the user's columns.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from dualform.attend.conditions import Condition, ConditionRows, holds, undecided
from dualform.attend.kept_groups import KeptGroups, find_kept_groups
from dualform.binning import Bins, By, bin_edges, grouping_columns, label_order
from dualform.engine.addresses import annotation_rows
from dualform.engine.jobs import Executor, Pass
from dualform.engine.local import LocalExecutor
from dualform.engine.reading import PatternRange, count_kept, kept_patterns, kept_rows
from dualform.engine.source import PatternPart, PatternSource
from dualform.errors import SelectionError

R = TypeVar("R")
GROUPINGS = 128 << 20  # bytes of groupings that are remembered, about


@dataclass(frozen=True, slots=True)
class Grouping:
    """Kept patterns by group.

    Attributes:
        parts: the columns.
        labels: (G,) each group's value, or tuple of values where there are several columns.
        codes: (n,) each kept pattern's group, in the order of a stream over them.
        kept: the sums of these groups, for a layer that keeps shares; there are no patterns and no codes then.
    """

    parts: tuple[str | Bins, ...]
    labels: tuple[Any, ...]
    codes: npt.NDArray[np.int64]
    kept: KeptGroups | None = None
    _there: dict[torch.device, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def on(self, device: torch.device) -> Tensor:
        """Return the codes on a device; on a GPU they stay."""
        if device.type == "cpu":
            return torch.from_numpy(self.codes)
        if device not in self._there:
            self._there[device] = torch.from_numpy(self.codes).to(device)
        return self._there[device]

    known_by_part = False

    def of(self, wanted: PatternRange, device: torch.device) -> Tensor:
        """Return the groups of a range's patterns, (n,)."""
        return self.on(device)[wanted.kept_before : wanted.kept_before + len(wanted)]

    @property
    def by(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(str(part) for part in self.parts)


@dataclass(frozen=True, slots=True)
class Numbered:
    """A column of whole numbers 0 <= n < size that are groups as they stand, read part by part as a pass goes on.

    For columns of millions of values, of which `Grouping` would make a list.
    """

    column: str
    size: int


class NumberedGroups:
    """The groups of the kept patterns of one layer by a numbered column, for a pass."""

    known_by_part = True

    def __init__(self, table: "Table", layer: str, numbered: Numbered) -> None:
        self._table = table
        self._layer = layer
        self._numbered = numbered
        self._found: dict[int, tuple[npt.NDArray[np.int64], Tensor]] = {}  # of the last parts read

    def of(self, wanted: PatternRange, device: torch.device) -> Tensor:
        """Return the groups of a range's patterns, (n,)."""
        part = wanted.part
        assert part is not None, "a numbered column is read part by part"
        found = self._found.get(part.index)
        if found is None:
            table = self._table
            rows = kept_rows(part, self._layer, table.horizon, table.mask)
            codes = torch.from_numpy(table.numbered_codes_of(part, self._layer, self._numbered))
            found = rows, codes.to(device)  # of a whole part: to copy each range would make it wait for a GPU
            self._found = {part.index: found, **dict(list(self._found.items())[:1])}
        rows, codes = found
        start = int(np.searchsorted(rows, wanted.rows[0]))
        return codes[start : start + len(wanted)].to(device)


@dataclass(frozen=True, slots=True)
class Table:
    """The pattern table of a view of a source, read column by column and part by part."""

    run: PatternSource
    conditions: tuple[Condition, ...]
    horizon: int
    executor: Executor = field(default_factory=LocalExecutor)
    masks: dict[tuple[str, int], npt.NDArray[np.bool_] | None] = field(default_factory=dict)
    groupings: dict[tuple[str, tuple[str | Bins, ...]], Grouping] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    unknown_counts: dict[str, int] = field(default_factory=dict)
    kept: dict[tuple[str | Bins, ...] | None, KeptGroups] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a worker of an executor have the view, without the executor and what was found here."""
        return Table, (self.run, self.conditions, self.horizon)

    @property
    def key(self) -> tuple[Any, ...]:
        """Names the view by its conditions, as text since 1 == True in Python, and its horizon."""
        return (repr(self.conditions), self.horizon)

    def narrowed(self, conditions: Iterable[Condition]) -> "Table":
        """Return the view of those of these patterns for which more conditions hold."""
        return Table(self.run, (*self.conditions, *conditions), self.horizon, self.executor)

    def answer(self, job: Pass[R]) -> R:
        """Run one job over this view's source."""
        found: R = self.executor.run(self.run, [job])[0]
        return found

    def dtype(self, layer: str) -> torch.dtype:
        """Return what a layer's patterns are computed in: float64 where they are stored as that, else float32."""
        return torch.float64 if self.run.layer(layer).dtype == "float64" else torch.float32

    def count(self, layer: str) -> int:
        """Return how many patterns of a layer the view holds; of a layer that keeps shares, how many it sums."""
        if layer not in self.counts:
            if self.keeps_shares(layer):
                self.counts[layer] = self.kept_groups(None).count(layer)
            else:
                self.counts[layer] = count_kept(self.run, layer, horizon=self.horizon, mask=self.mask)
        return self.counts[layer]

    def keeps_shares(self, layer: str) -> bool:
        """Say whether shares by group are all that the run keeps of a layer."""
        return self.run.layer(layer).store == "shares"

    def kept_groups(self, by: Sequence[str | Bins] | None) -> KeptGroups:
        """Return the view's groups of the shares that the run keeps, by these columns; None for one group of all."""
        at = None if by is None else tuple(by)
        if at not in self.kept:
            self.require(part.column if isinstance(part, Bins) else part for part in at or ())
            self.kept[at] = find_kept_groups(self.run, self.conditions, self.horizon, by)
        return self.kept[at]

    def unknown(self, layer: str) -> int:
        """Return how many patterns of a layer the conditions cannot decide, for want of a value in their columns.

        A pattern that another condition leaves out in any case does not count. `without` keeps such a pattern and
        `where` leaves it out.
        """
        if layer not in self.unknown_counts and self.keeps_shares(layer):
            self.unknown_counts[layer] = self.kept_groups(None).count_unknown(layer) if self.conditions else 0
        if layer not in self.unknown_counts:
            found = sum(self._undecided(part, layer) for part in self.run.parts()) if self.conditions else 0
            self.unknown_counts[layer] = found
        return self.unknown_counts[layer]

    def patterns(self, layer: str) -> npt.NDArray[np.int64]:
        """Return the number of each kept pattern of a layer, counted over all parts."""
        if not self.conditions:
            return _first_numbers(self.count(layer))
        return kept_patterns(self.run, layer, horizon=self.horizon, mask=self.mask)

    @property
    def names(self) -> tuple[str, ...]:
        """Every column there is."""
        return (*self.run.address, *self.run.description.columns)

    def require(self, names: Iterable[str]) -> None:
        """Raise unless all these columns exist."""
        for name in names:
            if name not in self.names:
                raise SelectionError(f"There is no column {name!r}. There are: {', '.join(self.names)}.")

    def mask(self, part: PatternPart, layer: str) -> npt.NDArray[np.bool_] | None:
        """Return which patterns of a part and layer the conditions keep; None for all of them."""
        if not self.conditions:
            return None
        at = (layer, part.index)
        if at not in self.masks:
            mask, rows = np.ones(part.count(layer), dtype=bool), self._condition_rows(part, layer)
            for one in self.conditions:
                mask &= holds(one, rows) ^ one.negated
            self.masks[at] = mask
        return self.masks[at]

    def _condition_rows(self, part: PatternPart, layer: str) -> ConditionRows:
        """Return a layer's patterns in a part as the rows that conditions are evaluated on."""

        def read(names: Sequence[str]) -> pa.Table:
            self.require(names)
            return self.run.table(part, layer, names)

        return ConditionRows(part.count(layer), self.names, read)

    def _undecided(self, part: PatternPart, layer: str) -> int:
        """Return how many patterns of a layer in one part the conditions cannot decide."""
        if not any(self._has_nulls(part, layer, name) for one in self.conditions for name in self._columns_of(one)):
            return 0
        found = undecided(self.conditions, self._condition_rows(part, layer))
        return int((found & (part.addresses(layer)["step"] < self.horizon)).sum())

    def _columns_of(self, one: Condition) -> list[str]:
        """Return the user's columns that a condition may depend on."""
        named = "" if one.sql is None else one.sql.casefold()
        columns = [name for name in self.run.description.columns if '"' in name or name.casefold() in named]
        return [
            *(columns if one.sql is not None else ()),
            *(name for name, _ in one.equal if name not in self.run.address),
        ]

    def _has_nulls(self, part: PatternPart, layer: str, name: str) -> bool:
        """Say whether some pattern of a layer may have no value in a column; reads no addresses."""
        if bool((part.calls(layer)["annotation_offset"] < 0).any()):
            return True
        column = part.annotation(name)
        return column is None or column.null_count > 0

    def column(self, part: PatternPart, layer: str, name: str) -> pa.Array:
        """Return one column for all of a layer's patterns in a part."""
        return self.run.table(part, layer, [name])[name].combine_chunks()

    def rows(self, layer: str, names: Sequence[str] | None = None) -> pa.Table:
        """Return the kept patterns' rows with these columns, or with all."""
        wanted = self.names if names is None else tuple(names)
        self.require(wanted)
        self.run.require_patterns(layer, "a table of patterns")
        parts = []
        for part in self.run.parts():
            kept = kept_rows(part, layer, self.horizon, self.mask)
            parts.append(self.run.table(part, layer, wanted).take(kept))
        if not parts:
            return pa.table({name: pa.array([], pa.int64()) for name in wanted})
        return pa.concat_tables(parts, promote_options="permissive")

    def lookup(self, layer: str, patterns: npt.NDArray[np.int64], names: Sequence[str]) -> dict[str, list[Any]]:
        """Return these columns for the patterns with these numbers; None where a number is negative."""
        found: dict[str, list[Any]] = {name: [None] * len(patterns) for name in names}
        before = 0
        for part in self.run.parts():
            count = part.count(layer)
            here = np.flatnonzero((patterns >= before) & (patterns < before + count))
            if len(here):
                rows = self.run.table(part, layer, names, patterns[here] - before)
                for name in names:
                    for i, value in zip(here.tolist(), rows[name].to_pylist(), strict=True):
                        found[name][i] = value
            before += count
        return found

    def group(self, layer: str, by: By) -> Grouping:
        """Group the kept patterns by one or several columns; a missing value is a group of its own, last."""
        parts = grouping_columns(by)
        at = (layer, parts)
        found = self.groupings.get(at)
        if found is None:
            found = self._kept_grouping(layer, parts) if self.keeps_shares(layer) else self._group(layer, parts)
            self.groupings[at] = found
            while sum(g.codes.nbytes for g in list(self.groupings.values())) > GROUPINGS and len(self.groupings) > 1:
                self.groupings.pop(list(self.groupings)[0], None)  # noqa: RUF015 (another thread may be here too)
        return found

    def _kept_grouping(self, layer: str, parts: tuple[str | Bins, ...]) -> Grouping:
        kept = self.kept_groups(parts).present_in(layer)
        return Grouping(parts, kept.labels, _NONE, kept)

    def _group(self, layer: str, parts: Sequence[str | Bins]) -> Grouping:
        encoded = [self._encode(layer, part) for part in parts]
        labels: list[Any] = encoded[0][0]
        codes = encoded[0][1]
        if len(encoded) > 1:
            for more, (next_labels, next_codes) in enumerate(encoded[1:]):
                wide = [label if more else (label,) for label in labels]
                width = max(len(next_labels), 1)
                present, codes = np.unique(codes * width + next_codes, return_inverse=True)
                labels = [(*wide[i // width], next_labels[i % width]) for i in present.tolist()]
        order = sorted(range(len(labels)), key=lambda i: label_order(labels[i]))
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        return Grouping(tuple(parts), tuple(labels[i] for i in order), place[codes] if len(codes) else codes)

    def numbered_codes(self, layer: str, groups: Numbered) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the values of a numbered column for the kept patterns of each part; `groups.size` for no value."""
        self.run.require_patterns(layer, f"a table by {groups.column!r}")
        for part in self.run.parts():
            yield self.numbered_codes_of(part, layer, groups)

    def numbered_codes_of(self, part: PatternPart, layer: str, groups: Numbered) -> npt.NDArray[np.int64]:
        """Return the values of a numbered column for the kept patterns of one part; `groups.size` for no value."""
        self.require([groups.column])
        self.run.require_patterns(layer, f"a table by {groups.column!r}")
        kept = kept_rows(part, layer, self.horizon, self.mask)
        rows = annotation_rows(part.calls(layer))
        rows = rows if len(kept) == len(rows) else rows[kept]
        column = part.annotation(groups.column, keep=False)
        found = np.full(len(kept), groups.size, dtype=np.int64)
        if column is not None:
            values = np.asarray(column.fill_null(groups.size), dtype=np.int64)
            if len(values) and (values.min() < 0 or values.max() > groups.size):
                raise SelectionError(
                    f"Column {groups.column!r} goes from {values.min()} to {values.max()}; expected numbers from 0 "
                    f"to {groups.size - 1}."
                )
            known = rows >= 0
            if known.all():
                return values[rows]
            found[known] = values[rows[known]]
        return found

    def _encode(self, layer: str, part: str | Bins) -> tuple[list[Any], npt.NDArray[np.int64]]:
        """Return a column's distinct values over the kept patterns, and each pattern's place among them."""
        name = part.column if isinstance(part, Bins) else part
        self.require([name])
        labels: dict[Any, int] = {}
        pieces = []
        for piece in self.run.parts():
            kept = kept_rows(piece, layer, self.horizon, self.mask)
            column = self.column(piece, layer, name).take(kept)
            if isinstance(part, Bins):
                column = bin_edges(column, part)
            encoded = column.dictionary_encode(null_encoding="encode")
            found = [math.nan if value != value else value for value in encoded.dictionary.to_pylist()]  # one NaN
            local = [labels.setdefault(value, len(labels)) for value in found]
            pieces.append(np.asarray(local, dtype=np.int64)[np.asarray(encoded.indices)] if local else _NONE)
        return list(labels), np.concatenate(pieces) if pieces else _NONE


_NONE = np.zeros(0, dtype=np.int64)


@functools.lru_cache(maxsize=2)
def _first_numbers(count: int) -> npt.NDArray[np.int64]:
    """Return the first whole numbers; to make millions of them for every question would take longer than the answer."""
    return np.arange(count)
