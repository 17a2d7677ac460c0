"""Columns that group patterns: a column's own values, or its numbers cut into bins of one width. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from dualform.errors import SelectionError
from dualform.lazy import compute as pc


@dataclass(frozen=True, slots=True)
class Bins:
    """A number column cut into bins of one width; a group is named by its lower edge."""

    column: str
    width: float

    def __str__(self) -> str:
        return f"{self.column}:{self.width:g}"


By = str | Bins | Sequence[str | Bins]


def bins(column: str, width: float) -> Bins:
    """Group a number column by bins of one width, for example `totals(by=bins("step", width=500))`."""
    if not width > 0:
        raise SelectionError(f"The width of bins is {width}; expected a positive number.")
    return Bins(column, width)


def grouping_columns(by: By) -> tuple[str | Bins, ...]:
    """Return the columns of a grouping, of which there is at least one."""
    parts = (by,) if isinstance(by, str | Bins) else tuple(by)
    if not parts:
        raise SelectionError("Nothing to group by. Give a column, for example by='label'.")
    return parts


def bin_edges(column: pa.Array, part: Bins) -> pa.Array:
    """Return the lower edge of the bin of each number of a column; whole where column and width are."""
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise SelectionError(f"Column {part.column!r} holds {column.type}; only numbers can be cut into bins.")
    edges = pc.multiply(pc.floor(pc.divide(column.cast(pa.float64()), part.width)), part.width)
    whole = pa.types.is_integer(column.type) and float(part.width).is_integer()
    return edges.cast(pa.int64()) if whole else edges


def label_order(label: Any) -> tuple[Any, ...]:
    """Return the key by which groups are sorted: numbers, then texts; NaN and missing values come last."""
    parts = label if isinstance(label, tuple) else (label,)
    return tuple(
        (part is None, part != part, isinstance(part, str), 0 if part is None or part != part else part)
        for part in parts
    )
