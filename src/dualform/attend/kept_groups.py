"""A view of the sums by group that a run keeps: which groups its mask keeps, put together into coarser groups.

A condition is evaluated on the table of group labels, a row per group, so that it must name only columns that the
groups have values of. A grouping follows from a kept one by summing, where its columns are among those of the kept one.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from dualform.attend.conditions import Condition, ConditionRows, holds, undecided
from dualform.attend.sql import named_columns
from dualform.binning import Bins, bin_edges, label_order
from dualform.engine.share_source import GroupKeySums, ParameterShares, ShareSource
from dualform.engine.source import PatternSource, groupings_text
from dualform.errors import SelectionError, SharesOnlyError
from dualform.recording.group_labels import rest_label

MAX_BIN_ROWS = 4_000_000
"""Rows of a table in which every whole number of every bin stands, on which a condition about bins is evaluated."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptGroups:
    """Groups of a view, each a union of the groups that the run keeps sums of.

    Attributes:
        source: the kept sums.
        by: the kept grouping that they are taken from.
        horizon: after how many steps.
        labels: (G,) each group's value, or tuple of values where there are several columns.
        codes: (F,) the group that each kept group belongs to; -1 where the view leaves it out.
        unknown: (F,) the kept groups that the mask cannot decide, for want of a value in its columns.
    """

    source: ShareSource
    by: tuple[str, ...]
    horizon: int
    labels: tuple[Any, ...]
    codes: Tensor
    unknown: Tensor

    def shares(self, parameter: str, layer: str | None = None) -> ParameterShares:
        """Return the groups' shares of a parameter, float64; those of one layer's patterns alone if it is named."""
        found = self.source.shares(parameter, self.by, layer=layer, horizon=self.horizon)
        parts = (found.start, found.unexplained, found.rounding)
        return ParameterShares(
            self.labels, self._add_up(found.labels, found.shares), *(part.cpu().double() for part in parts)
        )

    def key_sums(self, layer: str) -> GroupKeySums:
        """Return the groups' key sums in a layer."""
        found = self._kept_key_sums(layer)
        return GroupKeySums(
            self.labels, self._add_up(found.labels, found.sums), self._add_up(found.labels, found.counts), found.lowest
        )

    def count(self, layer: str) -> int:
        """Return how many patterns of a layer the view holds."""
        return self._count_where(layer, self.codes >= 0)

    def count_unknown(self, layer: str) -> int:
        """Return how many patterns of a layer the mask cannot decide."""
        return self._count_where(layer, self.unknown)

    def present_in(self, layer: str) -> "KeptGroups":
        """Return the groups that have patterns in a layer."""
        there = (self.key_sums(layer).counts > 0).nonzero()[:, 0]
        places = torch.full((len(self.labels) + 1,), -1)  # the last is for -1
        places[there] = torch.arange(len(there))
        labels = tuple(self.labels[i] for i in there.tolist())
        return dataclasses.replace(self, labels=labels, codes=places[self.codes])

    def _kept_key_sums(self, layer: str) -> GroupKeySums:
        return self.source.key_sums(layer, self.by, horizon=self.horizon)

    def _count_where(self, layer: str, wanted: Tensor) -> int:
        """Return how many patterns of a layer are in some of the kept groups, (F,)."""
        found = self._kept_key_sums(layer)
        return int(found.counts.cpu()[wanted[self._places(found.labels)]].sum())

    def _places(self, labels: Sequence[Any]) -> Tensor:
        """Return the places of some groups among all kept ones: at an early step not every group is there yet."""
        if len(labels) == len(self.codes):
            return torch.arange(len(labels))
        place = {label: i for i, label in enumerate(self.source.labels(self.by))}
        return torch.tensor([place[label] for label in labels], dtype=torch.int64)

    def _add_up(self, labels: Sequence[Any], kept: Tensor) -> Tensor:
        """Add the sums of kept groups, (F, ...), up to those of the view's groups, (G, ...)."""
        wide = kept.cpu().double() if kept.is_floating_point() else kept.cpu()
        total = wide.new_zeros(len(self.labels), *wide.shape[1:])
        codes = self.codes[self._places(labels)]
        return total.index_add_(0, codes[codes >= 0], wide[codes >= 0])


def find_kept_groups(
    run: PatternSource, conditions: Sequence[Condition], horizon: int, by: Sequence[str | Bins] | None
) -> KeptGroups:
    """Return the groups of a view by these columns, from the smallest kept grouping that tells them apart.

    Args:
        run: the run, which keeps shares.
        conditions: the conditions of the view.
        horizon: after how many steps.
        by: the columns to group by; None for one group of all that the view keeps.
    """
    source = run.require_shares()
    if horizon not in source.horizons:
        known = f"after steps {', '.join(map(str, source.horizons))}, and not" if source.horizons else "not"
        raise SelectionError(
            f"{run.name} keeps shares {known} after step {horizon}. They are kept at the end, with flush(), and where "
            f"they are asked for: keep=dualform.Shares(..., at=[{horizon}])."
        )
    wanted = [] if by is None else list(by)
    names = _columns_of(run, conditions)
    kept = [_LabelColumns(run, source, one) for one in source.groupings]
    fitting = [one for one in kept if all(map(one.gives, wanted)) and all(map(one.decides, names))]
    if not fitting:
        raise SharesOnlyError(_refusal(run, conditions, wanted, names))
    chosen = min(fitting, key=lambda one: len(one.labels))
    kept_mask, unknown = chosen.evaluate(conditions, names, horizon)
    if by is None:
        labels, codes = (None,), np.zeros(len(kept_mask), dtype=np.int64)
    else:
        labels, codes = _number([chosen.column(part) for part in wanted], kept_mask, chosen.rest)
    codes[~kept_mask] = -1
    return KeptGroups(source, chosen.by, horizon, labels, torch.from_numpy(codes), torch.from_numpy(unknown))


def _columns_of(run: PatternSource, conditions: Sequence[Condition]) -> list[str]:
    """Return the columns that conditions name."""
    every = _names(run)
    found = {name: None for one in conditions for name, _ in one.equal}
    for one in conditions:
        if one.sql is not None:
            found |= dict.fromkeys(sorted(named_columns(one.sql, every)))
    return list(found)


def _names(run: PatternSource) -> tuple[str, ...]:
    return (*run.address, *run.description.columns)


def _refusal(
    run: PatternSource, conditions: Sequence[Condition], wanted: Sequence[str | Bins], names: Sequence[str]
) -> str:
    """Say that no kept grouping answers a question, by the columns that it needs."""
    needed = list(dict.fromkeys([*map(str, wanted), *names]))
    text = ", ".join(map(repr, needed))
    masked = f" with the mask {'; '.join(map(str, conditions))}" if conditions else ""
    return (
        f"{run.name} keeps shares by {groupings_text(run.require_shares().groupings)} and no patterns; this "
        f"question{masked} needs groups by {text}. Record them: keep=dualform.Shares(by=...) of these columns, or "
        "keep=dualform.Patterns()."
    )


class _LabelColumns:
    """The groups of one kept grouping as a table: a row per group, a column per part of the grouping."""

    def __init__(self, run: PatternSource, source: ShareSource, by: tuple[str, ...]) -> None:
        self.run = run
        self.by = by
        self.labels = source.labels(by)
        self.rest = source.rest_place(by)  # of the group of all others, which has no values
        self.parts = tuple(_parse_part(run, text) for text in by)

    def gives(self, part: str | Bins) -> bool:
        """Say whether groups by a column follow from these groups."""
        return self._place(part) is not None

    def decides(self, name: str) -> bool:
        """Say whether a condition may name a column: these groups have one value of it, or a bin of whole numbers."""
        return self.gives(name) or self._bins_of(name) is not None

    def column(self, part: str | Bins) -> pa.Array:
        """Return each group's value of a column, (F,)."""
        place = self._place(part)
        assert place is not None, "asked for a column that these groups have"
        mine = self.parts[place]
        column = self._values(place)
        return column if mine == part or isinstance(part, str) else bin_edges(column, part)

    def evaluate(
        self, conditions: Sequence[Condition], names: Sequence[str], horizon: int
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Return which groups the conditions keep, and which they cannot decide, (F,) both."""
        self._require_no_rest(conditions)
        groups, columns = self._rows(names, horizon)
        every = _names(self.run)

        def read(wanted: Sequence[str]) -> pa.Table:
            # SQL may be shown columns that it does not name; they need only be there.
            found = {name: columns.get(name, pa.nulls(len(groups), self._type(name))) for name in wanted}
            return pa.table(found | ({"pattern": pa.array(np.arange(len(groups)))} if "pattern" in wanted else {}))

        rows = ConditionRows(len(groups), every, read)
        kept = np.ones(len(groups), dtype=bool)
        for one in conditions:
            kept &= holds(one, rows) ^ one.negated
        unknown = undecided(conditions, rows)
        found = self._whole_groups(groups, kept, conditions), self._whole_groups(groups, unknown, conditions)
        if self.rest is not None and conditions:  # no condition names a value of it
            found[0][self.rest], found[1][self.rest] = all(one.negated for one in conditions), False
        return found

    def _require_no_rest(self, conditions: Sequence[Condition]) -> None:
        """Raise where a condition may hold for some of the patterns whose own groups are not kept.

        Patterns of a value that has a group are all in it, so that a condition that asks for such values holds for none
        of the others.
        """
        if self.rest is None:
            return
        own = {label for place, label in enumerate(self.labels) if place != self.rest}
        for one in conditions:
            asked = [value if isinstance(value, tuple) else (value,) for _, value in one.equal]
            if one.sql is not None or len(self.parts) > 1 or not all(own.issuperset(values) for values in asked):
                raise SharesOnlyError(
                    f"The mask {one} cannot be decided for the group {self.labels[self.rest]!r} of "
                    f"{groupings_text([self.by])}, which holds all that came after the first {len(own)} groups. Name "
                    "groups that are kept, or record more of them: keep=dualform.Shares(..., groups=...)."
                )

    def _whole_groups(
        self, groups: npt.NDArray[np.int64], found: npt.NDArray[np.bool_], conditions: Sequence[Condition]
    ) -> npt.NDArray[np.bool_]:
        """Return for which groups something is so of all rows; raise where it is so of a part of a group."""
        sizes = np.bincount(groups, minlength=len(self.labels))
        hits = np.bincount(groups, weights=found, minlength=len(self.labels))
        cut = np.flatnonzero((hits > 0) & (hits < sizes))
        if len(cut):
            raise SharesOnlyError(
                f"The mask {'; '.join(map(str, conditions))} cuts through the group {self.labels[int(cut[0])]!r} of "
                f"{groupings_text([self.by])}. {self.run.name} keeps shares of whole groups: mask unions of them."
            )
        return (hits > 0) & (sizes > 0)

    def _rows(self, names: Iterable[str], horizon: int) -> tuple[npt.NDArray[np.int64], dict[str, pa.Array]]:
        """Return the group of each row that conditions are evaluated on, and these columns of the rows.

        A row is a group, or a whole number of a group's bin where a condition names a column that is kept in bins.
        """
        groups = np.arange(len(self.labels))
        binned = {name: found for name in names if not self.gives(name) and (found := self._bins_of(name)) is not None}
        columns: dict[str, pa.Array] = {name: self.column(name) for name in names if name not in binned}
        for name, place in binned.items():
            edges, part = self._values(place), self.parts[place]
            assert isinstance(part, Bins), "a column that is kept in bins"
            width = int(part.width)
            if len(groups) * width > MAX_BIN_ROWS:
                raise SelectionError(
                    f"A condition on {name!r}, which {self.run.name} keeps in {len(groups):,} groups of bins of "
                    f"{width:,}, is too large to decide. Mask groups by name instead."
                )
            numbers = np.asarray(edges.fill_null(0)).astype(np.int64)[groups][:, None] + np.arange(width)
            within = numbers < horizon if name == "step" else np.ones_like(numbers, dtype=bool)
            missing = np.asarray(edges.is_null())[groups]
            within[missing] = np.arange(width) == 0
            rows, _ = np.nonzero(within)
            columns = {other: column.take(pa.array(rows)) for other, column in columns.items()}
            columns[name] = pa.array(numbers[within], mask=missing[rows]).cast(self._type(name))
            groups = groups[rows]
        return groups, columns

    def _place(self, part: str | Bins) -> int | None:
        """Return the place of the kept column that a column follows from."""
        for place, mine in enumerate(self.parts):
            if mine == part:
                return place
            if isinstance(part, Bins):
                if mine == part.column:
                    return place
                if isinstance(mine, Bins) and mine.column == part.column and not math.fmod(part.width, mine.width):
                    return place
        return None

    def _bins_of(self, name: str) -> int | None:
        """Return the place of the column whose bins of whole numbers are kept."""
        for place, mine in enumerate(self.parts):
            if isinstance(mine, Bins) and mine.column == name and float(mine.width).is_integer():
                return place if pa.types.is_integer(self._type(name)) else None
        return None

    def _values(self, place: int) -> pa.Array:
        part = self.parts[place]
        values = [label[place] if len(self.parts) > 1 else label for label in self.labels]
        if self.rest is not None:
            values[self.rest] = None
        kind = self._type(part.column if isinstance(part, Bins) else part)
        if isinstance(part, Bins) and not (pa.types.is_integer(kind) and float(part.width).is_integer()):
            kind = pa.float64()
        return pa.array(values, kind)

    def _type(self, name: str) -> pa.DataType:
        return pa.int64() if name in self.run.address else pa.type_for_alias(self.run.description.columns[name])


def _parse_part(run: PatternSource, text: str) -> str | Bins:
    """Read a part of a kept grouping: a column's name, or bins as they write themselves."""
    if text in _names(run):
        return text
    column, _, width = text.rpartition(":")
    if column not in _names(run):
        raise SelectionError(f"The shares are kept by {text!r}, and the run has no such column.")
    return Bins(column, float(width))


def _number(
    columns: Sequence[pa.Array], kept: npt.NDArray[np.bool_], rest: int | None
) -> tuple[tuple[Any, ...], npt.NDArray[np.int64]]:
    """Return the distinct rows of some columns among the kept ones, in order, and the place of each row, (F,).

    The row of the group that holds all others stays apart, with a label that no other row has (`rest_label`).
    """
    plain = [[math.nan if value != value else value for value in column.to_pylist()] for column in columns]  # one NaN
    rows: list[Any] = plain[0] if len(plain) == 1 else list(zip(*plain, strict=True))
    if rest is not None:
        rows[rest] = rest_label(rows[:rest] + rows[rest + 1 :], len(plain))
    labels = tuple(sorted({row for row, keep in zip(rows, kept.tolist(), strict=True) if keep}, key=label_order))
    place = {label: i for i, label in enumerate(labels)}
    return labels, np.array([place.get(row, -1) for row in rows], dtype=np.int64)
