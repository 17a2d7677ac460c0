"""The user's columns: what `annotate` accepts, and which rows of a layer's call they belong to.

A binding is one call of `annotate`: columns of one batch, of shape (B,), (B, L) or a constant. It knows no files.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from dualform.errors import AnnotationError
from dualform.recording.rowcheck import RowCheck

MAX_INTEGER = int(np.iinfo(np.int64).max)
_INT64 = np.dtype(np.int64)  # numpy finds a type's dtype anew each time
ROWS = "rows"  # the argument of `annotate` that is no column: the batch's row of each of a layer's patterns

RESERVED = ("pattern", "layer", "step", "micro", "call", "row", "position")
RANK = "rank"  # the number of a pattern's process, of trainings in several processes; reserved there too


_NOTHING: Mapping[Any, Any] = MappingProxyType({})


def _nothing() -> Mapping[Any, Any]:
    """Return the empty mapping that every binding begins with and that all of them share.

    A program that annotates single rows makes many bindings, and most of them never get rows, checks or parts.
    """
    return _NOTHING


class Inputs:
    """The tensors that a forward was called with, to recognise them again; they are not kept alive."""

    __slots__ = ("_tensors",)

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [(weakref.ref(tensor), tensor._version) for tensor in tensors if not tensor.is_inference()]

    def same(self, other: "Inputs | None") -> bool:
        """Say whether another forward was called with the very same tensors, not written to since."""
        if other is None or not self._tensors or len(self._tensors) != len(other._tensors):
            return False
        pairs = zip(self._tensors, other._tensors, strict=True)
        return all(a() is not None and a() is b() and before == after for (a, before), (b, after) in pairs)


@dataclass(slots=True, eq=False)
class Binding:
    """One batch's annotations.

    Attributes:
        columns: each of shape (), (rows,) or (rows, positions).
        rows: the batch size; 0 when there are only constants, or the batch is empty.
        positions: the length of the second axis, or 0 when no column has one.
        missing: (size,) where there is no value in any column; nothing where there is one everywhere.
        given: the batch's row of each pattern of some layers, as the user gave it; -1 for no row.
        checks: what is known of each layer's rows in the forward that took this binding.
        forwards: each forward of the model that took it -> the tensors it was called with.
        arrived: those of them that a backward came to.
        begun_by: the name of the module whose forward took it first, "" for the whole model.
        parts: bindings of some of the columns, for layers that cannot take all, once they were asked for.
        constant: whether every column is a constant, which fits all patterns.
    """

    columns: Mapping[str, npt.NDArray[Any]]
    rows: int
    positions: int
    missing: npt.NDArray[np.bool_] | None = None
    given: Mapping[str, npt.NDArray[np.int64]] = field(default_factory=_nothing, repr=False)
    checks: Mapping[str, RowCheck] = field(default_factory=_nothing, repr=False)
    forwards: dict[int, "Inputs"] = field(default_factory=dict, repr=False)
    arrived: set[int] = field(default_factory=set, repr=False)
    begun_by: str | None = None
    parts: Mapping[tuple[str, ...], "Binding"] = field(default_factory=_nothing, repr=False)
    constant: bool = False

    def give(self, rows: Mapping[str, npt.NDArray[np.int64]]) -> None:
        """Take the batch's row of each pattern of some layers, as the user gives it."""
        if rows:
            self.given = {**self.given, **rows}

    def learn(self, checks: Mapping[str, RowCheck]) -> None:
        """Take what is known of some layers' rows in the forward that takes this binding."""
        self.checks = {**self.checks, **checks}

    @property
    def is_plain(self) -> bool:
        """Whether every column fits all patterns, and nothing is known of any layer's rows."""
        return self.constant and not self.checks and not self.given

    @property
    def size(self) -> int:
        """The number of table rows this binding takes at its finest column's resolution."""
        return max(self.rows, 1) * max(self.positions, 1)

    def fitting(self, rows: int, positions: int) -> "Binding | None":
        """Return the columns that a call of `rows × positions` patterns can take, if any.

        A constant fits always; (B,) where the rows agree, spread over any positions; (B, L) where both agree. A layer
        that saw the batch flattened to B · L rows takes them all.
        """
        if self.constant:
            return self
        return self._part(tuple(name for name in self.columns if self._fits(name, rows, positions)))

    def constants(self) -> "Binding | None":
        """Return the columns that are the same for all rows, if any: those fit a layer whose rows are not known."""
        return self._part(tuple(name for name, column in self.columns.items() if not column.ndim))

    def _part(self, names: tuple[str, ...]) -> "Binding | None":
        if len(names) == len(self.columns) or not names:
            return self if names else None
        if names not in self.parts:
            columns = {name: self.columns[name] for name in names}
            axes = max(column.ndim for column in columns.values())
            part = Binding(columns, self.rows if axes else 0, self.positions if axes == 2 else 0)
            self.parts = {**self.parts, names: part}
        return self.parts[names]

    def at_given_rows(self, layer: str, patterns: int) -> "Binding":
        """Return the columns per row and the constants for a layer whose rows the user gave, an entry per pattern."""
        order = self.given[layer]
        if len(order) != patterns:
            raise AnnotationError(
                f"annotate(rows=...) gives {len(order)} rows for layer {layer!r}, which saw {patterns} patterns. "
                "Give the batch's row of each of its patterns, -1 for none."
            )
        if len(order) and not (order.min() >= -1 and order.max() < self.rows):
            raise AnnotationError(
                f"annotate(rows=...) gives rows {order.min()} to {order.max()} for layer {layer!r}; the batch has rows "
                f"0 to {self.rows - 1}, and -1 stands for none."
            )
        at = (ROWS, layer)
        if at not in self.parts:
            none = order < 0
            columns = {
                name: np.where(none, column[:1], column[order]) if column.ndim else np.broadcast_to(column, (patterns,))
                for name, column in self.columns.items()
                if column.ndim < 2
            }
            part = Binding(columns, patterns, 0, missing=none if none.any() else None)
            self.parts = {**self.parts, at: part}
        return self.parts[at]

    def belongs_to(self, forward: int) -> bool:
        """Say whether these annotations were meant for a forward that took them.

        They were meant for the first that did. Others share them if the first one trains as well, or if they were
        called with the same tensors; otherwise the first one's batch was skipped, and this is another batch.
        """
        first = next(iter(self.forwards), forward)
        return first == forward or first in self.arrived or self.forwards[first].same(self.forwards.get(forward))

    def _fits(self, name: str, rows: int, positions: int) -> bool:
        shape = self.columns[name].shape
        flattened = self.positions > 0 and rows == self.rows * self.positions and positions == 1
        return flattened or not shape or shape == ((rows,) if len(shape) == 1 else (rows, positions))

    def misfit(self, name: str, layer: str, rows: int, positions: int) -> str:
        """Describe why a column does not fit, naming it and both lengths."""
        shape = f"{rows} rows" if positions == 1 else f"{rows} rows of {positions} positions"
        return f"column {name!r} has shape {tuple(self.columns[name].shape)}, but layer {layer!r} saw {shape}"

    def flat(self) -> dict[str, npt.NDArray[Any]]:
        """Return every column at the finest resolution, (size,) each."""
        shape: tuple[int, ...] = (max(self.rows, 1), max(self.positions, 1))
        return {
            name: np.broadcast_to(column.reshape(column.shape + (1,) * (2 - column.ndim)), shape).reshape(-1)
            for name, column in self.columns.items()
        }


class Annotator:
    """Which annotations a forward takes: given before it, kept until its backward has been."""

    def __init__(self) -> None:
        self.late = False  # whether a forward without annotations waits for its backward
        self._binding: Binding | None = None
        self._given: Mapping[str, Any] = {}  # the columns of the binding
        self._bound = False  # whether a forward has taken it
        self._spent: set[int] = set()  # ids of bindings whose backward has been
        self.forward = 0  # which forward of the model is running
        self._inputs = Inputs([])  # its tensors

    def annotate(self, columns: Mapping[str, Any], check: Callable[[Binding], None]) -> None:
        """Take columns for the next forward; those that are waiting for it already stay."""
        rows: Mapping[str, npt.NDArray[np.int64]] = {}
        if ROWS in columns and isinstance(columns[ROWS], Mapping):
            rows = _given_rows(columns[ROWS])
            columns = {name: column for name, column in columns.items() if name != ROWS}
        before = self._binding
        if rows and not columns and before is not None and id(before) not in self._spent:
            before.give(rows)  # also after its forward, which may have found the order of its rows
            return
        waiting = None if self._bound else before
        given = columns if waiting is None else {**self._given, **columns}
        binding = bind(given)
        check(binding)
        if waiting is not None:
            binding.give(waiting.given)
        binding.give(rows)
        self._given, self._binding, self._bound = given, binding, False
        self._spent.clear()

    def begin_forward(self, tensors: Sequence[Tensor]) -> Binding | None:
        """Count a forward of the whole model that begins, and return the annotations that it will take, if any."""
        self.forward += 1
        self._inputs = Inputs(tensors)
        spent = self._binding is not None and id(self._binding) in self._spent
        return None if spent else self._binding

    def for_forward(self, *, again: bool) -> Binding | None:
        """Return what a forward call takes; `again` where a checkpointed part is computed anew in its backward."""
        binding = self._binding
        if binding is not None and not again and id(binding) in self._spent:
            binding = self._binding = None
        self._bound = True
        self.late = binding is None
        if binding is not None and self.forward not in binding.forwards:
            binding.forwards[self.forward] = self._inputs
        return binding

    def spend(self, bindings: Iterable[Binding | None]) -> None:
        """Note that the backward of some bindings' forwards has been."""
        last: Binding | None = None
        for binding in bindings:
            if binding is not None and binding is not last:
                self._spent.add(id(binding))
                last = binding


def bind(columns: Mapping[str, Any]) -> Binding:
    """Check the columns of one batch against each other.

    >>> bind({"label": [3, 5], "task": "mnist"}).rows
    2
    """
    if not columns:
        raise AnnotationError("annotate() needs at least one column, for example annotate(label=labels).")
    arrays = {name: _as_column(name, value) for name, value in columns.items()}
    if {array.ndim for array in arrays.values()} == {0}:
        return Binding(arrays, 0, 0, constant=True)
    rows = positions = 0
    of_rows = of_positions = ""
    for name, array in arrays.items():
        if array.ndim >= 1:
            if of_rows and len(array) != rows:
                raise AnnotationError(
                    f"Column {name!r} has length {len(array)}, but column {of_rows!r} has length {rows}. "
                    "All columns of one batch need one entry per row."
                )
            rows, of_rows = len(array), name
        if array.ndim == 2:
            if len(array) and not array.shape[1]:
                raise AnnotationError(f"Column {name!r} has shape {array.shape}: its rows have no positions.")
            if of_positions and array.shape[1] != positions:
                raise AnnotationError(
                    f"Column {name!r} has {array.shape[1]} positions, but column {of_positions!r} has {positions}."
                )
            positions, of_positions = array.shape[1], name
    return Binding(columns=arrays, rows=rows, positions=positions)


def _given_rows(rows: Mapping[str, Any]) -> dict[str, npt.NDArray[np.int64]]:
    """Return the batch's row of each pattern, layer -> (n,), from what `annotate(rows=...)` was given."""
    found = {}
    for layer, order in rows.items():
        array = _as_array(ROWS, order)
        if array.dtype.kind not in "iu":
            raise AnnotationError(
                f"annotate(rows=...) holds {array.dtype} for layer {layer!r}; expected the batch's row of each of its "
                "patterns, as whole numbers, -1 for none."
            )
        found[layer] = array.astype(np.int64).reshape(-1)
    return found


def _as_column(name: str, value: Any) -> npt.NDArray[Any]:
    if name in RESERVED:
        raise AnnotationError(f"{name!r} is a column that every pattern has already. Choose another name.")
    if type(value) is int and -MAX_INTEGER <= value <= MAX_INTEGER:
        return np.array(value, _INT64)
    if type(value) is float:
        return np.array(value)
    array = _as_array(name, value)
    if array.ndim > 2:
        raise AnnotationError(
            f"Column {name!r} has shape {tuple(array.shape)}; expected a constant, (rows,) or (rows, positions)."
        )
    match array.dtype.kind:
        case "b" | "U":
            return array.copy()
        case "i" | "u":
            if array.dtype.kind == "u" and array.size and array.max() > MAX_INTEGER:
                raise AnnotationError(f"Column {name!r} holds {array.max()}, which no 64-bit integer holds.")
            return array.astype(np.int64)
        case "f":
            return array.astype(np.float64)
        case _:
            raise AnnotationError(
                f"Column {name!r} holds {array.dtype}; expected strings, integers, floats or booleans "
                "(all entries of one type)."
            )


def _as_array(name: str, value: Any) -> npt.NDArray[Any]:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = (value.double() if value.is_floating_point() else value).numpy()  # numpy knows no bfloat16
    if isinstance(value, str):
        _check_text(name, [value])
    try:
        array: npt.NDArray[Any] = np.asarray(value)
    except ValueError:
        raise AnnotationError(f"Column {name!r} has rows of different lengths; expected (rows, positions).") from None
    if isinstance(value, np.ndarray) and array.dtype.kind == "U":
        _check_text(name, array.reshape(-1).tolist())
    if array.dtype.kind == "O" or (array.dtype.kind == "U" and not isinstance(value, str | np.ndarray)):
        # Objects may all be strings (as in pandas); a list may mix in numbers, which numpy would spell out.
        entries: npt.NDArray[Any] = np.asarray(value, dtype=object)
        if not all(isinstance(entry, str) for entry in entries.flat):
            return entries
        _check_text(name, entries.reshape(-1).tolist())
        return array.astype(np.str_)
    return array


def _check_text(name: str, entries: Sequence[str]) -> None:
    """Refuse strings that could not be told apart, or not be written: with NUL characters, or lone surrogates."""
    joined = "".join(entries)
    try:
        joined.encode("utf-8")
    except UnicodeEncodeError:
        wrong = next(entry for entry in entries if not _is_writable(entry))
        raise AnnotationError(
            f"Column {name!r} holds {wrong!r}, which is no text: a lone surrogate, as os.fsdecode makes of undecodable "
            "bytes. Decode it with errors='replace'."
        ) from None
    if "\0" in joined:
        wrong = next(entry for entry in entries if "\0" in entry)
        raise AnnotationError(
            f"Column {name!r} holds {wrong!r}: a NUL character ends a text, so that different labels would become one. "
            "Remove it."
        )


def _is_writable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
