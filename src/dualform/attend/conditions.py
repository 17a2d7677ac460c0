"""Conditions of masks: SQL text, column values or both, and for which rows of a table of columns they hold.

The rows are patterns, or groups of patterns where only groups are kept. Nothing here reads a pattern.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dualform.attend.sql import sql_mask
from dualform.errors import SelectionError
from dualform.lazy import compute as pc


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
    return Condition(sql, tuple((name, _hashable(value)) for name, value in sorted(equal.items())), negated)


def _hashable(value: Any) -> Any:
    plain = value.tolist() if hasattr(value, "tolist") else value  # tensors and arrays
    return tuple(plain) if isinstance(plain, list | tuple | set | frozenset | range) else plain


@dataclass(frozen=True, slots=True)
class ConditionRows:
    """The rows that conditions are evaluated on.

    Attributes:
        count: how many rows there are.
        names: every column there is.
        read: returns a table (n) of some columns; the column `pattern` numbers the rows.
    """

    count: int
    names: tuple[str, ...]
    read: Callable[[Sequence[str]], pa.Table]

    def column(self, name: str) -> pa.Array:
        """Return one column."""
        return self.read([name])[name].combine_chunks()

    def sql_table(self, sql: str) -> pa.Table:
        """Return the columns that a condition may name."""
        named = sql.casefold()
        return self.read([n for n in self.names if n == "pattern" or '"' in n or n.casefold() in named])


def holds(one: Condition, rows: ConditionRows) -> npt.NDArray[np.bool_]:
    """Return for which rows a condition holds, (n,), before it is negated."""
    found = np.ones(rows.count, dtype=bool)
    for name, value in one.equal:
        found &= _equal_rows(name, rows.column(name), value)
    if one.sql is not None:
        found &= sql_mask(rows.sql_table(one.sql), one.sql, rows.names)
    return found


def is_unknown(one: Condition, rows: ConditionRows) -> npt.NDArray[np.bool_]:
    """Return for which rows a condition is neither true nor false, (n,), as in SQL, where null AND false is false."""
    null = np.zeros(rows.count, dtype=bool)
    refuted = np.zeros(rows.count, dtype=bool)
    for name, value in one.equal:
        column = rows.column(name)
        named = value is None or (isinstance(value, tuple) and None in value)  # a missing value is asked for
        missing = np.zeros(len(column), dtype=bool) if named else np.asarray(column.is_null())
        null |= missing
        refuted |= ~missing & ~_equal_rows(name, column, value)
    if one.sql is not None:
        table = rows.sql_table(one.sql)
        missing = sql_mask(table, f"({one.sql}\n) IS NULL", rows.names)
        null |= missing
        refuted |= ~missing & ~sql_mask(table, one.sql, rows.names)
    return null & ~refuted


def undecided(conditions: Sequence[Condition], rows: ConditionRows) -> npt.NDArray[np.bool_]:
    """Return which rows the conditions cannot decide, (n,), for want of a value in their columns.

    A row that another condition leaves out in any case does not count.
    """
    unknown, out = np.zeros(rows.count, dtype=bool), np.zeros(rows.count, dtype=bool)
    for one in conditions:
        missing = is_unknown(one, rows)
        unknown |= missing
        out |= ~missing & ~(holds(one, rows) ^ one.negated)
    return unknown & ~out


def _equal_rows(name: str, column: pa.Array, value: Any) -> npt.NDArray[np.bool_]:
    if value is None:
        return np.asarray(column.is_null())
    wanted = list(value) if isinstance(value, tuple) else [value]
    try:
        options = pa.array(wanted).cast(column.type)
    except (pa.ArrowException, TypeError, OverflowError, UnicodeError) as error:
        raise SelectionError(f"Column {name!r} holds {column.type}, which cannot equal {value!r}.") from error
    return np.asarray(pc.is_in(column, value_set=options))
