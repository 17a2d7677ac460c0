"""What the footer of a Parquet file says of its columns, read here rather than by pyarrow.

pyarrow ends the whole process when Python asks it for a column's codec or sizes and the footer is damaged there
(`std::terminate`, with one flipped bit). A footer is a struct in Thrift's compact protocol; the few fields that decide
how much memory a file takes are read from it by these lines, and whatever is no such struct is a `ValueError`.
"""

import os
from dataclasses import dataclass
from typing import Any

from dualform.store.blobs import Blob

MAGIC = b"PAR1"
MAX_FOOTER_BYTES = 4 << 20
"""Size above which a footer is refused: a hundred parts of twenty columns take a tenth of it."""
MAX_STRUCT_DEPTH = 16
CODECS = {0: "no codec", 1: "Snappy"}
"""The codecs that a column may have, by their number in the footer: how the writer writes."""


@dataclass(frozen=True, slots=True)
class ColumnPart:
    """One column of one group of rows."""

    rows: int  # of the group
    values: int  # of the column; of a column of lists their elements, and a place for each empty list
    codec: int
    nested: bool  # whether it is the elements of a list


def read_footer(blob: Blob) -> tuple[int, list[ColumnPart]]:
    """Return the number of rows of a Parquet file and its columns; raise `ValueError` where its footer is none."""
    with blob.open() as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 8))
        tail = file.read(8)
        length = int.from_bytes(tail[:4], "little")
        if tail[4:] != MAGIC or length > min(size - 12, MAX_FOOTER_BYTES):
            raise ValueError("it does not end like a Parquet file")
        file.seek(size - 8 - length)
        footer = file.read(length)
    try:
        whole = _Struct(footer).read(0)
        parts = []
        for group in whole[4]:
            for column in group[1]:
                facts = column[3]
                parts.append(ColumnPart(group[3], facts[5], facts[4], len(facts[3]) > 1))
        rows = whole[3]
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError("its footer is damaged") from error
    if not all(isinstance(n, int) for part in parts for n in (part.rows, part.values, part.codec, rows)):
        raise ValueError("its footer is damaged")
    return rows, parts


class _Struct:
    """Reads Thrift's compact protocol from bytes; running out of them is an `IndexError`."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0

    def read(self, depth: int) -> dict[int, Any]:
        """Return the fields of a struct by their numbers."""
        if depth > MAX_STRUCT_DEPTH:
            raise ValueError("its footer nests too deeply")
        content = self._content
        found: dict[int, Any] = {}
        number = 0
        while True:
            head = content[self._at]
            self._at += 1
            if not head:
                return found
            kind = head & 15
            number = number + (head >> 4) if head > 15 else self._signed()
            if kind in (4, 5, 6):  # most fields are numbers
                found[number] = self._signed()
            else:
                found[number] = kind == 1 if kind < 3 else self._value(kind, depth)

    def _value(self, kind: int, depth: int) -> Any:
        if kind == 8:
            return self._bytes(self._unsigned())
        if kind == 12:
            return self.read(depth + 1)
        if kind in (9, 10):
            head = self._content[self._at]
            self._at += 1
            count = head >> 4 if head >> 4 < 15 else self._unsigned()
            if count > len(self._content) - self._at:
                raise ValueError("its footer is damaged")
            return [self._value(head & 15, depth + 1) for _ in range(count)]
        if kind in (4, 5, 6):
            return self._signed()
        if kind in (1, 2, 3):
            return self._bytes(1)[0]
        if kind == 7:
            return self._bytes(8)
        raise ValueError("its footer is damaged")

    def _bytes(self, count: int) -> bytes:
        if count > len(self._content) - self._at:
            raise ValueError("its footer is damaged")
        self._at += count
        return self._content[self._at - count : self._at]

    def _unsigned(self) -> int:
        part = self._content[self._at]
        self._at += 1
        found, shift = part & 127, 7
        while part > 127:
            part = self._content[self._at]
            self._at += 1
            found |= (part & 127) << shift
            shift += 7
            if shift > 70:
                raise ValueError("its footer is damaged")
        return found

    def _signed(self) -> int:
        found = self._unsigned()
        return (found >> 1) ^ -(found & 1)
