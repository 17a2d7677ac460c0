"""Columns of Arrow tables, made of the memory that numpy arrays and encoded texts lie in.

`pyarrow.array` is not used: its first call imports pandas wherever pandas is installed, which takes as long as
hundreds of training steps, and it looks at the elements of a list one after the other.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_NUMBERS = {pa.int32(): np.int32, pa.int64(): np.int64, pa.float64(): np.float64}
"""Arrow's types whose elements lie in memory as numpy's do."""
_BY_KIND = {"b": pa.bool_(), "i": pa.int64(), "f": pa.float64(), "U": pa.string()}
"""The kind of a numpy array -> the type of a column with its elements."""
_BY_TYPE = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
"""The type of Python's objects -> the type of a column of them."""
MAX_TEXT_BYTES = (1 << 31) - 1
"""Bytes of all texts of a column up to which 32 bits hold their places, as Arrow's type of texts has them."""


def column_of(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return a column of a type of Arrow's; None is an entry without a value.

    The types are those of the tables of a run: numbers, truth values, texts, and lists of numbers.

    >>> column_of(["a", None, "bc"], pa.string()).to_pylist()
    ['a', None, 'bc']
    >>> column_of([[1.0, 2.0], [], None], pa.list_(pa.float64())).to_pylist()
    [[1.0, 2.0], [], None]
    """
    missing = None
    if None in values:
        missing = np.fromiter((value is None for value in values), dtype=np.bool_, count=len(values))
        nothing: Any = [] if pa.types.is_list(kind) else "" if kind == pa.string() else 0
        values = [nothing if value is None else value for value in values]
    if kind == pa.string():
        return _texts(values, missing)
    if pa.types.is_list(kind):
        return _lists(values, kind, missing)
    return _numbers(np.array(values, dtype=_NUMBERS.get(kind, np.bool_)), kind, missing)


def inferred_column(values: Sequence[Any]) -> pa.Array:
    """Return a column of the type that its entries have.

    >>> inferred_column([0.5, None]).type
    DataType(double)
    """
    kinds = set(map(type, values)) - {type(None)}
    kind = _BY_TYPE.get(kinds.pop()) if len(kinds) == 1 else None
    return pa.array(values) if kind is None else column_of(values, kind)


def column_of_array(values: npt.NDArray[Any], missing: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    """Return a column of the elements of a numpy array, (n,), but for those that are missing, where (n,) is true.

    >>> column_of_array(np.array([1.5, 2.5]), np.array([False, True])).to_pylist()
    [1.5, None]
    """
    kind = _BY_KIND[values.dtype.kind]
    if kind == pa.string():
        return _texts(values.tolist(), missing)
    return _numbers(values.astype(_NUMBERS.get(kind, np.bool_), copy=False), kind, missing)


def _numbers(values: npt.NDArray[Any], kind: pa.DataType, missing: npt.NDArray[np.bool_] | None) -> pa.Array:
    """Return a column of numbers or truth values; eight truth values lie in a byte."""
    content = np.packbits(values, bitorder="little") if values.dtype == np.bool_ else np.ascontiguousarray(values)
    return pa.Array.from_buffers(kind, len(values), [_validity(missing), pa.py_buffer(content)])


def _texts(values: Sequence[str], missing: npt.NDArray[np.bool_] | None) -> pa.Array:
    encoded = list(map(str.encode, values))
    content = b"".join(encoded)
    if len(content) > MAX_TEXT_BYTES:
        return pa.array(encoded, type=pa.string(), mask=missing)  # in several chunks
    buffers = [_validity(missing), pa.py_buffer(_ends(encoded)), pa.py_buffer(content)]
    return pa.Array.from_buffers(pa.string(), len(encoded), buffers)


def _lists(values: Sequence[Sequence[Any]], kind: pa.DataType, missing: npt.NDArray[np.bool_] | None) -> pa.Array:
    elements = column_of([element for value in values for element in value], kind.value_type)
    buffers = [_validity(missing), pa.py_buffer(_ends(values))]
    return pa.Array.from_buffers(kind, len(values), buffers, children=[elements])


def _ends(values: Sequence[Sequence[Any]]) -> npt.NDArray[np.int32]:
    """Return where each of several sequences ends that lie one behind the other, with a 0 before the first."""
    ends = np.zeros(len(values) + 1, dtype=np.int32)
    np.cumsum(np.fromiter(map(len, values), dtype=np.int32, count=len(values)), out=ends[1:])
    return ends


def _validity(missing: npt.NDArray[np.bool_] | None) -> pa.Buffer | None:
    """Return a bit for each entry that has a value, as Arrow has them; nothing where all entries do."""
    return None if missing is None else pa.py_buffer(np.packbits(~missing, bitorder="little"))
