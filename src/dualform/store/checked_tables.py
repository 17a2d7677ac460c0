"""Read Parquet files that may come from anybody: their footer is looked at before memory is taken.

A file of a few hundred bytes can stand for gigabytes: run lengths make a billion equal rows of one, a dictionary makes
a long text of every row, and codecs such as gzip or zstd shrink zeros a thousandfold. So a file must be in the form
that the writer gives it: compressed by Snappy or not at all (which shrinks at most 22-fold, whatever the footer
claims), with as many values in each column as there are rows, and within a budget of memory.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from dualform.errors import CorruptError, RemoteError
from dualform.lazy import compute as pc
from dualform.lazy import parquet as pq
from dualform.printable import cut
from dualform.store.blobs import Blob
from dualform.store.parquet_footer import CODECS, ColumnPart, read_footer

SNAPPY_RATIO = 22
"""How many times Snappy can shrink bytes at most: 64 bytes to 3."""
MIN_BUDGET = 64 << 20
"""Bytes of memory that the table of any shard may take."""
BUDGET_RATIO = 64
"""Bytes of memory that a table may take for each byte of the shard's files, where that is more."""

SchemaCheck = Callable[[pa.Schema], str]
"""Returns a sentence about a problem of a table's columns, or an empty text if there is none."""


def read_checked_table(
    blob: Blob, check: SchemaCheck, *, budget: int, columns: Sequence[str] | None = None
) -> pa.Table:
    """Return a table, or some of its columns, if its columns and its size are as they should be.

    Args:
        blob: the Parquet file.
        check: what is wrong with its columns.
        budget: bytes of memory that the table may take.
        columns: the columns to read; by default all.
    """
    try:
        size = blob.size()
        rows, parts = read_footer(blob)
        if problem := _size_problem(rows, parts, size, budget):
            raise _corrupt(blob, problem)
        file = pq.ParquetFile(_source(blob))
        schema = file.schema_arrow
        if problem := check(schema):
            raise _corrupt(blob, problem)
        wanted = None if columns is None else list(columns)
        texts = [field.name for field in schema if field.type == pa.string()]
        if not texts or rows * size * SNAPPY_RATIO <= MIN_BUDGET:
            table = file.read(columns=wanted)
        else:
            table = pq.ParquetFile(_source(blob), read_dictionary=texts).read(columns=wanted)
            if problem := _texts_problem(table, budget):
                raise _corrupt(blob, problem)
            table = _spelled_out(table)
        if texts:
            table.validate(full=True)  # that a text is one is not looked at in reading
    except RemoteError:
        raise  # which says nothing of the file
    except (OSError, ValueError, pa.ArrowException) as error:
        raise _unreadable_table(blob, error) from error
    return table


def count_rows(blob: Blob) -> int:
    """Return the number of rows of a Parquet file, without reading them."""
    try:
        rows: int = pq.read_metadata(_source(blob)).num_rows
    except RemoteError:
        raise  # which says nothing of the file
    except (OSError, ValueError, pa.ArrowException) as error:
        raise _unreadable_table(blob, error) from error
    return rows


def column_names(blob: Blob) -> list[str]:
    """Return the names of the columns of a Parquet file, without reading them."""
    try:
        names: list[str] = pq.read_schema(_source(blob)).names
    except RemoteError:
        raise  # which says nothing of the file
    except (OSError, ValueError, pa.ArrowException) as error:
        raise _unreadable_table(blob, error) from error
    return names


def _source(blob: Blob) -> Path | BinaryIO:
    """Return the argument for pyarrow's readers: the path of a local file, which is fastest, or an open blob."""
    return blob.local_path() or blob.open()


def _unreadable_table(blob: Blob, error: BaseException) -> CorruptError:
    return CorruptError(f"{blob} cannot be read: {cut(str(error), 300)}. Restore the file from a copy of the run.")


def _corrupt(blob: Blob, problem: str) -> CorruptError:
    return CorruptError(f"{blob}: {problem}. Restore the file from a copy of the run.")


def _size_problem(rows: int, parts: Sequence[ColumnPart], size: int, budget: int) -> str:
    """Return a sentence about a false or too large number in a footer, or an empty text if there is none."""
    total = 0
    for part in parts:
        if part.codec not in CODECS:
            return f"a column is compressed by codec {part.codec}; expected {' or '.join(CODECS.values())}"
        if not 0 <= part.rows <= rows or (part.values != part.rows and not part.nested) or part.values < 0:
            return f"a column has {part.values} values in {part.rows} of {rows} rows"
        total += 8 * max(part.values, part.rows)
    if total > budget:
        return f"its {rows} rows would take {total >> 20} MB, from a file of {size} bytes"
    return ""


def _texts_problem(table: pa.Table, budget: int) -> str:
    """Say which column's texts would take too much memory if they were spelled out; empty where none would."""
    for field in table.schema:
        spelled = 0
        for chunk in table[field.name].chunks if pa.types.is_dictionary(field.type) else ():
            lengths = pc.binary_length(chunk.dictionary).cast(pa.int64())
            spelled += pc.sum(lengths.take(chunk.indices.drop_null())).as_py() or 0
        if spelled > budget:
            return f"the texts of column {cut(repr(field.name))} would take {spelled >> 20} MB"
    return ""


def _spelled_out(table: pa.Table) -> pa.Table:
    """Return a table whose columns of texts are not dictionary-encoded."""
    for i, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            table = table.set_column(i, field.name, table.column(i).cast(pa.string()))
    return table
