"""Read Parquet files that may come from anybody: their footer is looked at before memory is taken.

A file of a few hundred bytes can stand for gigabytes: run lengths make a billion equal rows of one, a dictionary makes
a long text of every row, and codecs such as gzip or zstd shrink zeros a thousandfold. So a file must be in the form
that the writer gives it: compressed by Snappy or not at all (which shrinks at most 22-fold, whatever the footer
claims), with as many values in each column as there are rows, and within a budget of memory.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from dualform.errors import CorruptError
from dualform.lazy import compute as pc
from dualform.lazy import parquet as pq
from dualform.store.documents import cut

CODECS = ("SNAPPY", "UNCOMPRESSED")
SNAPPY_RATIO = 22
"""How many times Snappy can shrink bytes at most: 64 bytes to 3."""
MIN_BUDGET = 64 << 20
"""Bytes of memory that the table of any shard may take."""
BUDGET_RATIO = 64
"""Bytes of memory that a table may take for each byte of the shard's files, where that is more."""

SchemaCheck = Callable[[pa.Schema], str]
"""Returns what is wrong with the columns of a table, in words; empty where nothing is."""


def read_checked_table(
    path: Path, check: SchemaCheck, *, budget: int, columns: Sequence[str] | None = None
) -> pa.Table:
    """Return a table, or some of its columns, if its columns and its size are as they should be.

    Args:
        path: the Parquet file.
        check: what is wrong with its columns.
        budget: bytes of memory that the table may take.
        columns: the columns to read; by default all.
    """
    try:
        file = pq.ParquetFile(path)
        schema = file.schema_arrow
        problem = check(schema) or _size_problem(file.metadata, path.stat().st_size, budget)
        if problem:
            raise _corrupt(path, problem)
        wanted = None if columns is None else list(columns)
        texts = [field.name for field in schema if field.type == pa.string()]
        if file.metadata.num_rows * path.stat().st_size * SNAPPY_RATIO <= MIN_BUDGET or not texts:
            table = file.read(columns=wanted)
        else:
            table = _without_dictionaries(pq.ParquetFile(path, read_dictionary=texts).read(columns=wanted), budget)
        if texts:
            table.validate(full=True)  # that a text is one is not looked at in reading
    except (OSError, pa.ArrowException, MemoryError) as error:
        raise _unreadable(path, error) from error
    except _TooLargeError as error:
        raise _corrupt(path, str(error)) from None
    return table


def count_rows(path: Path) -> int:
    """Return the number of rows of a Parquet file, without reading them."""
    try:
        rows: int = pq.read_metadata(path).num_rows
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error
    return rows


def column_names(path: Path) -> list[str]:
    """Return the names of the columns of a Parquet file, without reading them."""
    try:
        names: list[str] = pq.read_schema(path).names
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error
    return names


class _TooLargeError(Exception):
    """A table would take more memory than it may."""


def _unreadable(path: Path, error: BaseException) -> CorruptError:
    return CorruptError(f"{path} cannot be read: {cut(str(error), 300)}. Restore the file from a copy of the run.")


def _corrupt(path: Path, problem: str) -> CorruptError:
    return CorruptError(f"{path}: {problem}. Restore the file from a copy of the run.")


def _size_problem(footer: Any, size: int, budget: int) -> str:
    """Say what a footer claims that cannot be, or takes too much memory; empty where nothing does."""
    total = 0
    for i in range(footer.num_row_groups):
        group = footer.row_group(i)
        if group.num_rows < 0:
            return "its rows are fewer than none"
        for j in range(footer.num_columns):
            column = group.column(j)
            if column.compression not in CODECS:
                return f"a column is compressed by {column.compression}; expected {' or '.join(CODECS)}"
            listed = "." in column.path_in_schema and column.path_in_schema.endswith(".element")
            if not listed and column.num_values != group.num_rows:
                return f"a column has {column.num_values} values in {group.num_rows} rows"
            total += 8 * max(column.num_values, group.num_rows)
    rows = sum(footer.row_group(i).num_rows for i in range(footer.num_row_groups))
    if rows != footer.num_rows:
        return f"its parts have {rows} rows, but the whole has {footer.num_rows}"
    if total > budget:
        return f"its {footer.num_rows} rows would take {total >> 20} MB, from a file of {size} bytes"
    return ""


def _without_dictionaries(table: pa.Table, budget: int) -> pa.Table:
    """Return a table with its texts spelled out, if they do not take too much memory then."""
    for i, field in enumerate(table.schema):
        if not pa.types.is_dictionary(field.type):
            continue
        column = table.column(i)
        spelled = 0
        for chunk in column.chunks:
            lengths = pc.binary_length(chunk.dictionary).cast(pa.int64())
            spelled += pc.sum(lengths.take(chunk.indices.drop_null())).as_py() or 0
        if spelled > budget:
            raise _TooLargeError(f"the texts of column {cut(repr(field.name))} would take {spelled >> 20} MB")
        table = table.set_column(i, field.name, column.cast(pa.string()))
    return table
