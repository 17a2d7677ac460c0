"""Steps as the disk writer takes them: each call's patterns joined with its place in the step, in the CPU's memory.

A step may wait for its shard for half a minute. What the training thread hands over is many small objects, one for each
call and batch; the writer's thread compacts them to a few, because Python's garbage collector looks through every
object that lives long, again and again, on whichever thread it happens to run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualform.recording.annotations import Binding
from dualform.recording.rowcheck import RowCheck
from dualform.recording.sinks import CallRecord, ParameterFacts, StepCall, StepFacts
from dualform.store.host_copy import HostCopier, HostCopy

MAX_JOINED_BYTES = 1 << 16
"""Bytes of a call's patterns up to which they are put together with those of other calls of the same layer."""


class TakenCall(NamedTuple):
    """The patterns of one call, or of several small calls of one layer one after the other.

    The fields are those of `CallRecord` and `StepCall`; of several calls `micro` and `call` are the first one's, and
    `positions` is the largest.
    """

    layer: str
    micro: int
    call: int
    positions: int
    keys: Tensor  # (T, d_in)
    values: Tensor | None  # (T, d_out)
    raw: bool

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values in memory."""
        return self.keys.nbytes + (0 if self.values is None else self.values.nbytes)


CallRow = tuple[str, int, int, int, int, int, int | None, int | None, int | None, str | None]
"""A call's row in the calls table, without its step and the offset of its patterns.

layer, micro, call, rows, positions, inner, and layout are those of `StepCall`. Before the layout come the call's first
row among the step's rows of columns (None without columns), and the rows and positions of its columns. A plain tuple of
numbers and strings is something that the garbage collector need not look through.
"""


class ColumnRows(NamedTuple):
    """Rows of the user's columns, one after the other: name -> (n,), and where no column has a value, (n,) or None."""

    columns: Mapping[str, npt.NDArray[Any]]
    missing: npt.NDArray[np.bool_] | None

    @property
    def kind(self) -> tuple[tuple[str, str], ...]:
        """The names and types of the columns; rows of one kind may be put together."""
        return tuple((name, column.dtype.kind) for name, column in self.columns.items())


@dataclass(slots=True)
class TakenStep:
    """One step to write. Its tensors may be looked at after `wait` and before `release`."""

    step: int
    calls: Sequence[TakenCall]
    places: Sequence[tuple[str, StepCall]]  # the layer and the place of each call, until the step is compacted
    facts: Sequence[ParameterFacts]
    samples: Mapping[str, Tensor]
    rows: Mapping[str, RowCheck]
    copy: HostCopy | None  # until it is released: it refers to all tensors
    call_rows: list[CallRow] = field(default_factory=list)  # once it is compacted
    columns: list[ColumnRows] = field(default_factory=list)  # once it is compacted

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values in memory."""
        return sum(call.nbytes for call in self.calls)

    def wait(self) -> None:
        """Return when patterns and samples are here: they may be on their way from a GPU."""
        if self.copy is not None:
            self.copy.wait()

    def compact(self) -> None:
        """Turn the places of the calls into rows, and put small calls of a layer together; after `wait`."""
        self.call_rows, self.columns = _rows_of(self.places)
        self.places = ()
        by_layer: dict[str, list[TakenCall]] = {}
        for call in self.calls:
            by_layer.setdefault(call.layer, []).append(call)
        if len(by_layer) < len(self.calls) and all(call.nbytes <= MAX_JOINED_BYTES for call in self.calls):
            copy, self.copy = self.copy, None
            self.calls = [_joined(calls) for calls in by_layer.values()]
            if copy is not None:
                copy.release()

    def release(self) -> None:
        """Let go of the patterns, so that their memory can be used again."""
        copy, self.copy, self.calls = self.copy, None, ()
        if copy is not None:
            copy.release()


def _joined(calls: Sequence[TakenCall]) -> TakenCall:
    """Return the patterns of several calls of one layer as one, in memory of their own."""
    values = [call.values for call in calls if call.values is not None]
    return calls[0]._replace(
        positions=max(call.positions for call in calls),
        keys=torch.cat([call.keys for call in calls]),
        values=torch.cat(values) if values else None,
    )


def _rows_of(places: Sequence[tuple[str, StepCall]]) -> tuple[list[CallRow], list[ColumnRows]]:
    """Return the rows of a step's calls, and the columns that they refer to, each batch's once."""
    found: list[CallRow] = []
    offsets: dict[int, int] = {}  # id of a binding -> its first row
    bindings: list[Binding] = []
    rows_before = 0
    for layer, (_, micro, call, rows, positions, inner, binding, layout, _) in places:
        if binding is None or not rows * positions:  # an empty batch has nothing to annotate
            found.append((layer, micro, call, rows, positions, inner, None, None, None, layout))
            continue
        offset = offsets.get(id(binding))
        if offset is None:
            offset = offsets[id(binding)] = rows_before
            bindings.append(binding)
            rows_before += binding.size
        annotated = offset, binding.rows, binding.positions
        found.append((layer, micro, call, rows, positions, inner, *annotated, layout))
    if len(bindings) > 1 and all(binding.constant for binding in bindings):
        columns = [ColumnRows({name: column[None] for name, column in b.columns.items()}, None) for b in bindings]
    else:
        columns = [ColumnRows(binding.flat(), binding.missing) for binding in bindings]
    return found, join_columns(columns)


def join_columns(rows: Sequence[ColumnRows]) -> list[ColumnRows]:
    """Put rows of columns together that follow each other and have the same columns, and values everywhere."""
    runs: list[list[ColumnRows]] = []
    before: object = None
    for one in rows:
        kind = one.kind if one.missing is None else None
        if kind is None or kind != before:
            runs.append([])
        runs[-1].append(one)
        before = kind
    return [
        run[0]
        if len(run) == 1
        else ColumnRows({name: np.concatenate([one.columns[name] for one in run]) for name in run[0].columns}, None)
        for run in runs
    ]


class AccumulatedCalls:
    """The calls that were accumulated and may reach a step to come."""

    def __init__(self) -> None:
        self._copier = HostCopier()
        self._records: dict[int, CallRecord] = {}  # by number

    def add(self, record: CallRecord) -> None:
        """Take a call that was just accumulated."""
        self._records[record.number] = record

    def discard(self, backwards: Sequence[int]) -> None:
        """Let go of the calls of some backwards."""
        gone = set(backwards)
        self._records = {number: one for number, one in self._records.items() if one.backward not in gone}

    def clear(self) -> None:
        """Let go of everything."""
        self._records = {}

    def join(self, facts: StepFacts) -> TakenStep:
        """Return a step with its patterns, on their way to the CPU's memory where they are not there."""
        records = [self._records[call.number] for call in facts.calls]
        keys = [call.keys_of(record) for call, record in zip(facts.calls, records, strict=True)]
        values = [record.values for record in records if record.values is not None]
        copy = self._copier.copy([*keys, *values, *facts.samples.values()])
        host_keys, rest = copy.tensors[: len(keys)], copy.tensors[len(keys) :]
        host_values = iter(rest[: len(values)])
        calls = [
            TakenCall(
                record.layer,
                call.micro,
                call.call,
                call.positions,
                host_key,
                None if record.values is None else next(host_values),
                record.raw,
            )
            for call, record, host_key in zip(facts.calls, records, host_keys, strict=True)
        ]
        places = [(record.layer, call) for call, record in zip(facts.calls, records, strict=True)]
        samples = dict(zip(facts.samples, rest[len(values) :], strict=True))
        return TakenStep(facts.step, calls, places, facts.facts, samples, facts.rows, copy)
