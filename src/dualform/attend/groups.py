"""From annotations to masks and groups: which patterns a condition keeps, and which share a value.

Conditions are keyword equality (plain Arrow) or SQL text (DuckDB, on one registered table, with external access off).
Both see a pattern's address (pattern, step, micro, call, row, position) and the user's columns.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from dualform.attend.distinct import Distinct, find_distinct
from dualform.attend.sql import sql_mask
from dualform.errors import SelectionError
from dualform.lazy import compute as pc
from dualform.store.reader import Run, Shard
from dualform.store.stream import Keep, count_kept, first_numbers, numbers_kept, selected

GROUPINGS = 128 << 20  # bytes of groupings that are remembered, about
ADDRESS = ("pattern", "step", "micro", "call", "row", "position")


@dataclass(frozen=True, slots=True)
class Bins:
    """A number column cut into bins of one width; a group is named by its lower edge."""

    column: str
    width: float

    def __str__(self) -> str:
        return f"{self.column}:{self.width:g}"


By = str | Bins | Sequence[str | Bins]


def bins(column: str, *, width: float) -> Bins:
    """Group a number column by bins of one width, for example `totals(by=bins("step", width=500))`."""
    if not width > 0:
        raise SelectionError(f"The width of bins is {width}; expected a positive number.")
    return Bins(column, width)


@dataclass(frozen=True, slots=True)
class Condition:
    """Keep the patterns for which something holds, or with `negated` those for which it does not."""

    sql: str | None
    equal: tuple[tuple[str, Any], ...] = ()
    negated: bool = False

    def __str__(self) -> str:
        parts = [f"({self.sql})"] if self.sql is not None else []
        parts += [f"{name} = {value!r}" for name, value in self.equal]
        return ("not " if self.negated else "") + " and ".join(parts)


def condition(sql: str | None, equal: Mapping[str, Any], *, negated: bool) -> Condition:
    """Make a condition of SQL text, keyword equalities, or both."""
    if sql is None and not equal:
        raise SelectionError('Nothing to select by. Give SQL text ("step >= 3000") or columns (task="mnist").')
    return Condition(sql, tuple((name, _frozen(value)) for name, value in sorted(equal.items())), negated)


def _frozen(value: Any) -> Any:
    plain = value.tolist() if hasattr(value, "tolist") else value  # tensors and arrays
    return tuple(plain) if isinstance(plain, list | tuple | set | frozenset | range) else plain


@dataclass(frozen=True, slots=True)
class Grouping:
    """Kept patterns by group.

    Attributes:
        parts: the columns.
        labels: (G,) each group's value, or tuple of values where there are several columns.
        codes: (n,) each kept pattern's group, in the order of a stream over them.
    """

    parts: tuple[str | Bins, ...]
    labels: tuple[Any, ...]
    codes: npt.NDArray[np.int64]
    _there: dict[torch.device, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def on(self, device: torch.device) -> Tensor:
        """Return the codes on a device; on a GPU they stay."""
        if device.type == "cpu":
            return torch.from_numpy(self.codes)
        if device not in self._there:
            self._there[device] = torch.from_numpy(self.codes).to(device)
        return self._there[device]

    @property
    def by(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(str(part) for part in self.parts)


@dataclass(frozen=True, slots=True)
class Numbered:
    """A column of whole numbers 0 <= n < size that are groups as they stand, read shard by shard as a pass goes on.

    For columns of millions of values, of which `Grouping` would make a list.
    """

    column: str
    size: int


@dataclass(frozen=True, slots=True)
class Table:
    """The pattern table of a run, read column by column and shard by shard."""

    run: Run
    conditions: tuple[Condition, ...]
    horizon: int
    masks: dict[tuple[str, int], npt.NDArray[np.bool_] | None] = field(default_factory=dict)
    groupings: dict[tuple[str, tuple[str | Bins, ...]], Grouping] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    unknown_counts: dict[str, int] = field(default_factory=dict)
    distinct_keys: dict[str, Distinct | None] = field(default_factory=dict)

    def count(self, layer: str) -> int:
        """Return how many patterns of a layer are kept."""
        if layer not in self.counts:
            self.counts[layer] = count_kept(self.run, layer, horizon=self.horizon, keep=self._mask)
        return self.counts[layer]

    def unknown(self, layer: str) -> int:
        """Return how many patterns of a layer the conditions cannot decide, for want of a value in their columns.

        A pattern that another condition leaves out in any case does not count. `without` keeps such a pattern and
        `where` leaves it out.
        """
        if layer not in self.unknown_counts:
            found = sum(self._undecided(shard, layer) for shard in self.run.shards) if self.conditions else 0
            self.unknown_counts[layer] = found
        return self.unknown_counts[layer]

    def kept(self, layer: str) -> npt.NDArray[np.int64]:
        """Return the number of each kept pattern of a layer, counted over all shards."""
        if not self.conditions:
            return first_numbers(self.count(layer))
        return numbers_kept(self.run, layer, horizon=self.horizon, keep=self._mask)

    def distinct(self, layer: str) -> Distinct | None:
        """Return the distinct keys of the kept patterns of a layer, where they are known and fewer."""
        if layer not in self.distinct_keys:
            found = find_distinct(self.run, layer, horizon=self.horizon, keep=self._mask)
            self.distinct_keys[layer] = found
        return self.distinct_keys[layer]

    @property
    def names(self) -> tuple[str, ...]:
        """Every column there is."""
        return (*ADDRESS, *self.run.manifest.columns)

    def require(self, names: Iterable[str]) -> None:
        """Raise unless all these columns exist."""
        for name in names:
            if name not in self.names:
                raise SelectionError(f"There is no column {name!r}. There are: {', '.join(self.names)}.")

    def keep(self) -> Keep:
        """Return which patterns the conditions keep, as the streaming pass wants it."""
        return self._mask

    def _mask(self, shard: Shard, layer: str) -> npt.NDArray[np.bool_] | None:
        if not self.conditions:
            return None
        at = (layer, shard.entry.index)
        if at not in self.masks:
            mask = np.ones(shard.count(layer), dtype=bool)
            for one in self.conditions:
                mask &= self._holds(one, shard, layer) ^ one.negated
            self.masks[at] = mask
        return self.masks[at]

    def _holds(self, one: Condition, shard: Shard, layer: str) -> npt.NDArray[np.bool_]:
        holds = np.ones(shard.count(layer), dtype=bool)
        for name, value in one.equal:
            self.require([name])
            holds &= _equals(name, self.column(shard, layer, name), value)
        if one.sql is not None:
            holds &= sql_mask(self._sql_table(one.sql, shard, layer), one.sql, self.names)
        return holds

    def _undecided(self, shard: Shard, layer: str) -> int:
        """Return how many patterns of a layer in one shard the conditions cannot decide."""
        if not any(self._has_nulls(shard, layer, name) for one in self.conditions for name in self._columns_of(one)):
            return 0
        count = shard.count(layer)
        unknown, out = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)
        for one in self.conditions:
            missing = self._is_null(one, shard, layer)
            unknown |= missing
            out |= ~missing & ~(self._holds(one, shard, layer) ^ one.negated)
        return int((unknown & ~out & (shard.addresses(layer)["step"] < self.horizon)).sum())

    def _columns_of(self, one: Condition) -> list[str]:
        """Return the user's columns that a condition may depend on."""
        named = "" if one.sql is None else one.sql.casefold()
        columns = [name for name in self.run.manifest.columns if '"' in name or name.casefold() in named]
        return [*(columns if one.sql is not None else ()), *(name for name, _ in one.equal if name not in ADDRESS)]

    def _has_nulls(self, shard: Shard, layer: str, name: str) -> bool:
        """Say whether some pattern of a layer may have no value in a column; reads no addresses."""
        if bool((shard.calls(layer)["annotation_offset"] < 0).any()):
            return True
        column = shard.annotations[name] if name in shard.annotations.column_names else None
        return column is None or column.null_count > 0

    def _is_null(self, one: Condition, shard: Shard, layer: str) -> npt.NDArray[np.bool_]:
        """Return for which patterns a condition is neither true nor false, as in SQL, where null AND false is false."""
        null = np.zeros(shard.count(layer), dtype=bool)
        refuted = np.zeros(shard.count(layer), dtype=bool)
        for name, value in one.equal:
            column = self.column(shard, layer, name)
            named = value is None or (isinstance(value, tuple) and None in value)  # a missing value is asked for
            missing = np.zeros(len(column), dtype=bool) if named else np.asarray(column.is_null())
            null |= missing
            refuted |= ~missing & ~_equals(name, column, value)
        if one.sql is not None:
            table = self._sql_table(one.sql, shard, layer)
            missing = sql_mask(table, f"({one.sql}\n) IS NULL", self.names)
            null |= missing
            refuted |= ~missing & ~sql_mask(table, one.sql, self.names)
        return null & ~refuted

    def _sql_table(self, sql: str, shard: Shard, layer: str) -> pa.Table:
        """Return the columns that a condition may name, for all of a layer's patterns in a shard."""
        named = sql.casefold()
        used = [name for name in self.names if name == "pattern" or '"' in name or name.casefold() in named]
        return pa.table({name: self.column(shard, layer, name) for name in used})

    def column(self, shard: Shard, layer: str, name: str) -> pa.Array:
        """Return one column for all of a layer's patterns in a shard."""
        if name == "pattern":
            before = sum(s.count(layer) for s in self.run.shards if s.entry.index < shard.entry.index)
            return pa.array(np.arange(shard.count(layer)) + before)
        address = shard.addresses(layer)
        if name in address and name in ADDRESS:
            return pa.array(address[name])
        return _annotation(self.run, shard, name, address["annotation"])

    def rows(self, layer: str, names: Sequence[str] | None = None) -> pa.Table:
        """Return the kept patterns' rows with these columns, or with all."""
        wanted = self.names if names is None else tuple(names)
        self.require(wanted)
        parts = []
        for shard in self.run.shards:
            kept = selected(shard, layer, self.horizon, self._mask)
            parts.append(pa.table({name: self.column(shard, layer, name).take(kept) for name in wanted}))
        if not parts:
            return pa.table({name: pa.array([], pa.int64()) for name in wanted})
        return pa.concat_tables(parts, promote_options="permissive")

    def lookup(self, layer: str, patterns: npt.NDArray[np.int64], names: Sequence[str]) -> dict[str, list[Any]]:
        """Return these columns for the patterns with these numbers; None where a number is negative."""
        found: dict[str, list[Any]] = {name: [None] * len(patterns) for name in names}
        before = 0
        for shard in self.run.shards:
            count = shard.count(layer)
            here = np.flatnonzero((patterns >= before) & (patterns < before + count))
            if len(here):
                local = patterns[here] - before
                address = shard.addresses(layer, local)
                for name in names:
                    values = self._looked_up(shard, name, local, address, before)
                    for i, value in zip(here.tolist(), values, strict=True):
                        found[name][i] = value
            before += count
        return found

    def _looked_up(
        self,
        shard: Shard,
        name: str,
        local: npt.NDArray[np.int64],
        address: Mapping[str, npt.NDArray[np.int64]],
        before: int,
    ) -> list[Any]:
        """Return one column for some of a layer's patterns in a shard, given their addresses."""
        found: list[Any]
        if name == "pattern":
            found = (local + before).tolist()
        elif name in ADDRESS:
            found = address[name].tolist()
        else:
            found = _annotation(self.run, shard, name, address["annotation"]).to_pylist()
        return found

    def group(self, layer: str, by: By) -> Grouping:
        """Group the kept patterns by one or several columns; a missing value is a group of its own, last."""
        parts: list[str | Bins] = [by] if isinstance(by, str | Bins) else list(by)
        if not parts:
            raise SelectionError("Nothing to group by. Give a column, for example by='label'.")
        at = (layer, tuple(parts))
        found = self.groupings.get(at)
        if found is None:
            found = self.groupings[at] = self._group(layer, parts)
            while sum(g.codes.nbytes for g in list(self.groupings.values())) > GROUPINGS and len(self.groupings) > 1:
                self.groupings.pop(list(self.groupings)[0], None)  # noqa: RUF015 (another thread may be here too)
        return found

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
        order = sorted(range(len(labels)), key=lambda i: _order(labels[i]))
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        return Grouping(tuple(parts), tuple(labels[i] for i in order), place[codes] if len(codes) else codes)

    def numbers(self, layer: str, groups: Numbered) -> Iterator[npt.NDArray[np.int64]]:
        """Yield a column of the kept patterns, shard by shard; where it has no value, the number after the last."""
        for shard in self.run.shards:
            yield self.numbers_of(shard, layer, groups)

    def numbers_of(self, shard: Shard, layer: str, groups: Numbered) -> npt.NDArray[np.int64]:
        """Return a column of the kept patterns of one shard."""
        self.require([groups.column])
        kept = selected(shard, layer, self.horizon, self._mask)
        rows = shard.addresses(layer)["annotation"][kept]
        column = shard.annotation(groups.column)
        found = np.full(len(kept), groups.size, dtype=np.int64)
        if column is not None:
            values = np.asarray(column.fill_null(groups.size), dtype=np.int64)
            if len(values) and (values.min() < 0 or values.max() > groups.size):
                raise SelectionError(
                    f"Column {groups.column!r} goes from {values.min()} to {values.max()}; expected numbers from 0 "
                    f"to {groups.size - 1}."
                )
            found[rows >= 0] = values[rows[rows >= 0]]
        return found

    def _encode(self, layer: str, part: str | Bins) -> tuple[list[Any], npt.NDArray[np.int64]]:
        """Return a column's distinct values over the kept patterns, and each pattern's place among them."""
        name = part.column if isinstance(part, Bins) else part
        self.require([name])
        labels: dict[Any, int] = {}
        pieces = []
        for shard in self.run.shards:
            kept = selected(shard, layer, self.horizon, self._mask)
            column = self.column(shard, layer, name).take(kept)
            if isinstance(part, Bins):
                column = _binned(column, part)
            encoded = column.dictionary_encode(null_encoding="encode")
            found = [math.nan if value != value else value for value in encoded.dictionary.to_pylist()]  # one NaN
            local = [labels.setdefault(value, len(labels)) for value in found]
            pieces.append(np.asarray(local, dtype=np.int64)[np.asarray(encoded.indices)] if local else _NONE)
        return list(labels), np.concatenate(pieces) if pieces else _NONE


_NONE = np.zeros(0, dtype=np.int64)


def _annotation(run: Run, shard: Shard, name: str, rows: npt.NDArray[np.int64]) -> pa.Array:
    kind = pa.type_for_alias(run.manifest.columns[name])
    if name not in shard.annotations.column_names or not shard.annotations.num_rows:
        return pa.nulls(len(rows), kind)
    column = shard.annotations[name].combine_chunks().cast(kind)
    return column.take(pa.array(rows, mask=rows < 0))


def _equals(name: str, column: pa.Array, value: Any) -> npt.NDArray[np.bool_]:
    if value is None:
        return np.asarray(column.is_null())
    wanted = list(value) if isinstance(value, tuple) else [value]
    try:
        options = pa.array(wanted).cast(column.type)
    except (pa.ArrowException, TypeError, OverflowError, UnicodeError) as error:
        raise SelectionError(f"Column {name!r} holds {column.type}, which cannot equal {value!r}.") from error
    return np.asarray(pc.is_in(column, value_set=options))


def _binned(column: pa.Array, part: Bins) -> pa.Array:
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise SelectionError(f"Column {part.column!r} holds {column.type}; only numbers can be cut into bins.")
    edges = pc.multiply(pc.floor(pc.divide(column.cast(pa.float64()), part.width)), part.width)
    whole = pa.types.is_integer(column.type) and float(part.width).is_integer()
    return edges.cast(pa.int64()) if whole else edges


def _order(label: Any) -> tuple[Any, ...]:
    parts = label if isinstance(label, tuple) else (label,)
    return tuple(
        (part is None, part != part, isinstance(part, str), 0 if part is None or part != part else part)
        for part in parts
    )
