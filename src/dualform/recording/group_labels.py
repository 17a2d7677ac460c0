"""Which group each pattern of a call belongs to: the values of the user's columns, numbered as they come.

A pattern whose column has no value is in a group of its own, None, as everywhere.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dualform.binning import Bins
from dualform.errors import RefusedError
from dualform.recording.annotations import RESERVED, Binding
from dualform.recording.sinks import StepCall

Codes = npt.NDArray[np.int64]
REST = "rest"
"""The label of the group of all patterns whose own groups came after the last that is kept; see `rest_label`."""
ADDRESS_COLUMNS = tuple(name for name in RESERVED if name not in ("pattern", "layer"))


class GroupLabels:
    """The groups of one grouping, in the order in which they came.

    Attributes:
        columns: what groups the patterns.
        labels: each group's value, or tuple of values where there are several columns.
    """

    def __init__(self, columns: Sequence[str | Bins], *, most: int, rest: bool) -> None:
        self.columns = tuple(columns)
        self.labels: list[Any] = []
        self._most = most
        self._rest = rest
        self._places: dict[Any, int] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The columns as a `ShareSource` names them."""
        return tuple(str(column) for column in self.columns)

    @property
    def has_rest(self) -> bool:
        """Whether the last group is that of the patterns beyond the last group of their own."""
        return len(self.labels) > self._most

    def load(self, labels: Sequence[Any]) -> None:
        """Go on with groups that came earlier."""
        self.labels = list(labels)
        self._places = {label_mark(label): place for place, label in enumerate(self.labels[: self._most])}

    def see(self, labels: Sequence[Any]) -> None:
        """Number groups, in their order, unless they have a number."""
        for label in labels:
            self._place(label)

    def codes(self, step: int, call: StepCall, *, batch_last: bool) -> Codes:
        """Return the group of each pattern of a call, (T,); a value that is new becomes a new group.

        Args:
            step: the number of the step.
            call: the call's place in the step, and its columns.
            batch_last: whether the batch is not the first axis of the model's inputs.
        """
        patterns = call.rows * call.positions
        if not patterns:  # of an empty batch, whose columns may be empty too
            return np.zeros(0, dtype=np.int64)
        parts = [_column(column, step, call, patterns, batch_last=batch_last) for column in self.columns]
        local: Codes = np.zeros(patterns, dtype=np.int64)
        labels: list[tuple[Any, ...]] = [()]
        for distinct, places in parts:
            width = max(len(distinct), 1)
            if width == 1:
                labels = [(*label, distinct[0]) for label in labels] if distinct else labels
                continue
            present, local = np.unique(local * width + places, return_inverse=True)
            labels = [(*labels[i // width], distinct[i % width]) for i in present.tolist()]
        found = np.array([self._place(label if len(parts) > 1 else label[0]) for label in labels], dtype=np.int64)
        return found[local]

    def _place(self, label: Any) -> int:
        mark = label_mark(label)
        place = self._places.get(mark)
        if place is not None:
            return place
        if len(self.labels) >= self._most:
            if not self._rest:
                raise _too_many(self.names, self._most, label)
            return self._rest_place()
        return self._new(label)

    def _rest_place(self) -> int:
        """Return the group of patterns beyond the last group, which is one more."""
        if not self.has_rest:
            self.labels.append(rest_label(self.labels, len(self.columns)))
        return self._most

    def _new(self, label: Any) -> int:
        place = self._places[label_mark(label)] = len(self.labels)
        self.labels.append(label)
        return place


def rest_label(labels: Sequence[Any], columns: int) -> Any:
    """Return a label for the group of all others that is none of the user's: "rest", or else "(rest)" and so on.

    >>> rest_label(["a", "b"], 1), rest_label(["a", "rest"], 1), rest_label([("a", 1)], 2)
    ('rest', '(rest)', ('rest', 'rest'))
    """
    text = REST
    while True:
        label = text if columns == 1 else (text,) * columns
        if label not in labels:
            return label
        text = f"({text})"


class TooManyGroupsError(RefusedError):
    """A grouping has more groups than the recording keeps."""


def _too_many(names: Sequence[str], most: int, label: Any) -> TooManyGroupsError:
    return TooManyGroupsError(
        f"{label!r} is one group more than the {most} that shares by {', '.join(names)} are kept for"
    )


def label_mark(label: Any) -> Any:
    """Return what tells groups apart: 1 and 1.0 are one label, True is another, and NaN is one."""
    parts = label if isinstance(label, tuple) else (label,)
    return tuple((isinstance(part, bool), "nan" if part != part else part, isinstance(part, str)) for part in parts)


def _column(
    column: str | Bins, step: int, call: StepCall, patterns: int, *, batch_last: bool
) -> tuple[list[Any], Codes]:
    """Return the distinct values of a column in a call, and the place among them of each pattern's value, (T,)."""
    name = column.column if isinstance(column, Bins) else column
    everywhere: Codes = np.zeros(patterns, dtype=np.int64)
    if name in ADDRESS_COLUMNS:
        values = _address(name, step, call, patterns)
        missing = None
    else:
        binding = call.binding
        if binding is None or name not in binding.columns:
            return [None], everywhere
        values, missing = _annotation(binding, name, call, patterns, batch_last=batch_last)
    if isinstance(column, Bins):
        values = _edges(column, values)
    if values.ndim == 0 and missing is None:
        return [_plain(values[()])], everywhere
    values = np.broadcast_to(values, (patterns,)) if values.ndim == 0 else values
    distinct, places = np.unique(values, return_inverse=True)
    labels: list[Any] = [_plain(value) for value in distinct]
    if missing is not None and missing.any():
        places = np.where(missing, len(labels), places)
        labels.append(None)
    return labels, places.astype(np.int64, copy=False)


def _plain(value: Any) -> Any:
    found = value.item() if hasattr(value, "item") else value
    return math.nan if found != found else found


def _edges(column: Bins, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if values.dtype.kind not in "if":
        raise RefusedError(f"Column {column.column!r} holds {values.dtype}; only numbers can be cut into bins.")
    edges = np.floor(values.astype(np.float64) / column.width) * column.width
    whole = values.dtype.kind == "i" and float(column.width).is_integer()
    return np.asarray(edges.astype(np.int64) if whole else edges)


def _address(name: str, step: int, call: StepCall, patterns: int) -> npt.NDArray[np.int64]:
    constants = {"step": step, "micro": call.micro, "call": call.call}
    if name in constants:
        return np.asarray(constants[name], dtype=np.int64)
    row, position = _places(call, patterns)
    return row if name == "row" else position


def _places(call: StepCall, patterns: int) -> tuple[Codes, Codes]:
    """Return row and position of each pattern of a call, whose leading axes are (outer, rows, inner)."""
    place = np.arange(patterns)
    inner, rows = max(call.inner, 1), max(call.rows, 1)
    return (place // inner) % rows, (place // (inner * rows)) * call.inner + place % inner


def _annotation(
    binding: Binding, name: str, call: StepCall, patterns: int, *, batch_last: bool
) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_] | None]:
    """Return a column's value at each pattern, (T,) or one for all, and where there is none."""
    column, missing = binding.columns[name], binding.missing
    if column.ndim == 0 and missing is None:
        return column, None
    row, position = _places(call, patterns)
    rows, positions = binding.rows, binding.positions
    at = row * max(positions, 1) + (position if positions else 0)
    if positions and call.rows == rows * positions and call.rows != rows:
        # A layer that saw the batch flattened to (B · L) rows: its row number runs over both axes.
        at = (row % max(rows, 1)) * positions + row // max(rows, 1) if batch_last else row
    wide = np.broadcast_to(
        column.reshape(column.shape + (1,) * (2 - column.ndim)), (max(rows, 1), max(positions, 1))
    ).reshape(-1)
    if not rows:
        at = np.zeros_like(at)
    return wide[at], None if missing is None else missing[at]
