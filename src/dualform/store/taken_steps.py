"""Steps as the disk writer takes them: each call's patterns joined with its place in the step, in the CPU's memory.

Patterns that are on a GPU are encoded there, as they will be stored, before they are copied: fewer bytes have to
come over, and the writer's thread has nothing to compute. Patterns in the CPU's memory are encoded by that thread.

A step may wait for its shard for half a minute. What the training thread hands over is many small objects, one for each
call and batch; the writer's thread compacts them to a few, because Python's garbage collector looks through every
object that lives long, again and again, on whichever thread it happens to run.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualform.engine.call_marks import CallMarks
from dualform.engine.proofs import ParameterMarker, digest_annotations, digest_calls
from dualform.recording.annotations import Binding
from dualform.recording.parameter_samples import samples_in, tensors_of_samples
from dualform.recording.rowcheck import RowCheck
from dualform.recording.sinks import CallRecord, ParameterFacts, StepCall, StepFacts
from dualform.store.element_range import Ends, element_range, joined_ranges
from dualform.store.host_copy import MAX_PACKED_BYTES, HostCopier, HostCopy, is_elsewhere
from dualform.store.pool import MIN_POOLED_WIDTH
from dualform.store.row_encoding import ROW_SCALED, address_seed, encode, stored_dtypes
from dualform.store.unfolding_check import sizes_text

MAX_JOINED_BYTES = 1 << 16
"""Bytes of a call's patterns up to which they are put together with those of other calls of the same layer."""


class TakenRows(NamedTuple):
    """Keys or values of a call.

    Attributes:
        rows: (T, d), as they were trained with or as they are stored.
        scales: of stored rows that have some, (T,) float32.
        encoded: whether the rows are as they are stored.
        range: the least and the greatest element of keys, () each, where a GPU has found them.
        seen: of stored inputs the part that lies in any key, whose elements' range is that of the keys.
    """

    rows: Tensor
    scales: Tensor | None = None
    encoded: bool = False
    range: tuple[Tensor, ...] = ()
    seen: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return int(self.rows.nbytes) if self.scales is None else self.rows.nbytes + self.scales.nbytes

    def tensors(self) -> list[Tensor]:
        """Return the tensors that are there, in a fixed order."""
        return [self.rows, *(() if self.scales is None else (self.scales,)), *self.range]

    @property
    def range_is_of_rows(self) -> bool:
        """Whether `ends` reads the range of keys from the rows themselves, all of them."""
        return not self.range and self.seen is None

    def ends(self) -> Ends | None:
        """Return the least and the greatest element of keys; nothing where there are no keys."""
        if self.range:
            return float(self.range[0]), float(self.range[1])
        return element_range(self.rows if self.seen is None else self.seen)


class TakenCall(NamedTuple):
    """The patterns of one call, or of several small calls of one layer one after the other.

    Attributes:
        layer: the layer's name.
        micro: which backward of the step accumulated them; of several calls the first one's.
        call: which call of its layer in that backward; of several calls the first one's.
        keys: (T, d_in); of a layer whose inputs are stored the elements of these, or of keys, (n,).
        values: (T, d_out), or None where only keys are kept.
        pooled: whether the layer's identical keys are stored once.
        joinable: whether the rows are encoded without regard to their address, so that those of calls may be joined.
    """

    layer: str
    micro: int
    call: int
    keys: TakenRows
    values: TakenRows | None
    pooled: bool
    joinable: bool


@dataclass(frozen=True, slots=True)
class StepMarks:
    """The marks by which a step is recognised when the training is run again (`dualform.engine.proofs`).

    Attributes:
        parameters: the packed mark of each parameter after the step.
        inputs: the checksum of the keys of each call whose keys owe nothing to the parameters, (1,) each.
        backwards: of the first call of each backward the checksums of what it took and of its errors, (1,) each.
        calls: the digest of the step's calls.
        annotations: the digest of the calls' annotations.
    """

    parameters: Mapping[str, Tensor]
    inputs: Sequence[Tensor]
    backwards: Sequence[Tensor]
    calls: str
    annotations: str


CALL_CELLS = 11
"""Cells of a call's row of the calls table, without its step and the offset of its patterns.

layer, micro, call, rows, positions and inner are those of `StepCall`. Then come the call's first row among the step's
rows of columns (None without columns), and the rows and positions of its columns; its layout; and the sizes of its
inputs, where these are stored.
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
    pattern_bytes: int  # of keys and values in memory
    facts: Sequence[ParameterFacts]
    samples: Mapping[str, Tensor]
    rows: Mapping[str, RowCheck]
    copy: HostCopy | None  # until it is released: it refers to all tensors
    marks: StepMarks | None = None  # where the training is to be run again
    sizes: Sequence[str | None] = ()  # of each call's inputs, where any of the run are stored, until it is compacted
    call_cells: list[int | str | None] = field(default_factory=list)  # of all calls' rows, once it is compacted
    columns: list[ColumnRows] = field(default_factory=list)  # once it is compacted

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values in memory; of samples too in a run that stores few patterns or none."""
        samples = () if self.marks is None else tensors_of_samples(self.samples)
        return self.pattern_bytes + sum(sample.nbytes for sample in samples)

    def wait(self) -> None:
        """Return when patterns and samples are here: they may be on their way from a GPU."""
        if self.copy is not None:
            self.copy.wait()

    def compact(self) -> None:
        """Turn the places of the calls into rows, and put small calls of a layer together; after `wait`."""
        self.call_cells, self.columns = _rows_of(self.places, self.sizes or [None] * len(self.places))
        self.places, self.sizes = (), ()
        by_layer: dict[str, list[TakenCall]] = {}
        for call in self.calls:
            by_layer.setdefault(call.layer, []).append(call)
        if len(by_layer) < len(self.calls):
            self.calls = [one for calls in by_layer.values() for one in _joined(calls)]
            self.copy = None

    def release(self) -> None:
        """Let go of the patterns, so that their memory can be used again."""
        self.copy, self.calls = None, ()


def _joined(calls: Sequence[TakenCall]) -> Sequence[TakenCall]:
    """Return several small calls of one layer as one call, in memory of its own; other calls as they are."""
    if len(calls) == 1:
        return calls
    keys: list[Tensor] = []
    values: list[Tensor] = []
    has_range = False
    for _, _, _, own_keys, own_values, _, joinable in calls:
        size = own_keys.rows.nbytes
        keys.append(own_keys.rows)
        if own_values is not None:
            size += own_values.rows.nbytes
            values.append(own_values.rows)
        if not joinable or size > MAX_JOINED_BYTES:
            return calls
        has_range = has_range or own_keys.seen is not None
    ends: tuple[Tensor, ...] = ()
    if has_range:
        whole = functools.reduce(joined_ranges, [call.keys.ends() for call in calls])
        ends = () if whole is None else tuple(torch.tensor(whole, dtype=torch.float64))
    joined = TakenRows(torch.cat(keys), range=ends)
    return [calls[0]._replace(keys=joined, values=TakenRows(torch.cat(values)) if values else None)]


def _rows_of(
    places: Sequence[tuple[str, StepCall]], sizes: Sequence[str | None]
) -> tuple[list[int | str | None], list[ColumnRows]]:
    """Return the cells of the rows of a step's calls, and the columns that they refer to, each batch's once.

    A list of numbers and texts is one object that the garbage collector looks at; a tuple for each call were many.
    """
    found: list[int | str | None] = []
    placed: dict[int, tuple[int, int, int]] = {}  # id of a binding -> its first row, its rows and its positions
    bindings: list[Binding] = []
    rows_before = 0
    for (layer, (_, micro, call, rows, positions, inner, binding, layout, _)), size in zip(places, sizes, strict=True):
        if binding is None or not rows * positions:  # an empty batch has nothing to annotate
            found += (layer, micro, call, rows, positions, inner, None, None, None, layout, size)
            continue
        annotated = placed.get(id(binding))
        if annotated is None:
            annotated = placed[id(binding)] = rows_before, binding.rows, binding.positions
            bindings.append(binding)
            rows_before += binding.size
        found += (layer, micro, call, rows, positions, inner, *annotated, layout, size)
    if len(bindings) > 1 and all(binding.constant for binding in bindings):
        return found, _constant_columns(bindings)
    return found, join_columns([ColumnRows(binding.flat(), binding.missing) for binding in bindings])


def _constant_columns(bindings: Sequence[Binding]) -> list[ColumnRows]:
    """Return the columns of batches that have constants alone, a row for each batch."""
    found: list[ColumnRows] = []
    for _, alike in itertools.groupby(bindings, _kind_of_constants):
        columns = [binding.columns for binding in alike]
        found.append(ColumnRows({name: np.array([each[name] for each in columns]) for name in columns[0]}, None))
    return found


def _kind_of_constants(binding: Binding) -> list[tuple[str, str]]:
    """Return the names and types of a batch's columns."""
    return [(name, column.dtype.kind) for name, column in binding.columns.items()]


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


class PooledLayers:
    """Says which layers' identical keys are stored once: those whose first patterns are worth it, for good."""

    def __init__(self, seen: Collection[str] = (), pooled: Collection[str] = ()) -> None:
        """Begin with the layers that a resumed run has patterns of, and those among them that have a pool."""
        self._decided = {name: name in pooled for name in seen}

    def has(self, record: CallRecord, call: StepCall) -> bool:
        """Say whether a call's layer has a pool; the layer's first call decides."""
        decided = self._decided.get(record.layer)
        if decided is None:
            wide = record.keys.is_floating_point() and record.width >= MIN_POOLED_WIDTH
            decided = self._decided[record.layer] = record.raw and wide and call.positions == 1
        return decided


class AccumulatedCalls:
    """The calls that were accumulated and may reach a step to come."""

    def __init__(
        self,
        dtypes: Mapping[str, torch.dtype],
        pooled: PooledLayers,
        *,
        unstored: Collection[str] = (),
        inputs: Collection[str] = (),
        marker: ParameterMarker | None = None,
        rank: int = 0,
    ) -> None:
        """Take calls.

        Args:
            dtypes: layer -> the dtype that it is stored in.
            pooled: says which layers' identical keys are stored once.
            unstored: the layers whose patterns are let go of at once; only their calls' places are kept.
            inputs: the layers whose inputs are stored in place of their keys.
            marker: marks the parameters after each step; None where the training is not to be run again.
            rank: the number of this process, of several.
        """
        self._dtypes = dtypes
        self._pooled = pooled
        self._unstored = frozenset(unstored)
        self._with_inputs = frozenset(inputs)
        self._marker = marker
        self._rank = rank
        self._copier = HostCopier()
        self._records: dict[int, CallRecord] = {}  # by number
        self._call_marks = CallMarks()
        self._bytes = 0  # of all of them, as they will be in the CPU's memory

    def stores(self, layer: str) -> bool:
        """Say whether a layer's patterns are stored."""
        return layer not in self._unstored

    def add(self, record: CallRecord) -> None:
        """Take a call that was just accumulated."""
        if self._marker is not None:
            self._call_marks.add(record)
        record = record.without_first()
        if record.layer in self._unstored:
            record = record._replace(keys=record.keys.new_empty(0, record.keys.shape[1]), values=None)
        self._records[record.number] = record
        self._bytes += self._nbytes(record)

    def discard(self, backwards: Sequence[int]) -> None:
        """Let go of the calls of some backwards."""
        gone = set(backwards)
        if {one.backward for one in self._records.values()} <= gone:
            self.clear()  # the marks too: every call that was marked has a record
            return
        self._records = {number: one for number, one in self._records.items() if one.backward not in gone}
        self._call_marks.discard(backwards)
        self._bytes = sum(self._nbytes(record) for record in self._records.values())

    def clear(self) -> None:
        """Let go of everything."""
        self._records, self._bytes = {}, 0
        self._call_marks.clear()

    def nbytes(self) -> int:
        """Return the bytes of all patterns, as they will be in the CPU's memory."""
        return self._bytes

    def _nbytes(self, record: CallRecord) -> int:
        if not is_elsewhere(record.keys):
            return record.nbytes
        size = self._dtypes[record.layer].itemsize
        both = [record.keys] if record.values is None else [record.keys, record.values]
        return sum(size * rows.numel() if rows.is_floating_point() else rows.nbytes for rows in both)

    def join(self, facts: StepFacts) -> TakenStep:
        """Return a step with its patterns, on their way to the CPU's memory where they are not there."""
        records = [self._records[call.number] for call in facts.calls]
        found: list[TakenRows] = []
        sizes: list[str | None] = []
        pooled: list[bool] = []
        for call, record in zip(facts.calls, records, strict=True):
            layer, values, seen, size = record.layer, record.values, None, None
            keys = call.keys_of(record)
            in_pool = layer not in self._unstored and self._pooled.has(record, call)
            if record.unfolding is not None and in_pool:
                keys = record.unfolding.rows(keys)
            elif layer in self._with_inputs and not in_pool:
                seen = keys
                if record.unfolding is not None:
                    seen = record.unfolding.used(keys)
                    size = sizes_text(keys.shape[2:])
                keys = keys.reshape(-1)
            pooled.append(in_pool)
            sizes.append(size)
            if not is_elsewhere(keys):
                found.append(TakenRows(keys, None, False, (), seen))
                if values is not None:
                    found.append(TakenRows(values))
                continue
            of_keys, of_values = stored_dtypes(self._dtypes[layer], pooled=in_pool)
            seed = functools.partial(_seed, layer, facts.step, call, self._rank)
            if seen is not None:
                of_keys = keys.dtype if self._dtypes[layer] in ROW_SCALED else of_keys
            # Keys of a pool are known by the bytes that were trained with.
            found.append(_encoded(keys, None if in_pool else of_keys, seed, "keys", keys if seen is None else seen))
            if values is not None:
                found.append(_encoded(values, of_values, seed, "values", None))
        marked = {} if self._marker is None else self._marker.measure(facts.parameters)
        inputs, backwards = self._call_marks.of_step(records) if self._marker is not None else ([], [])
        pattern_bytes = sum([rows.nbytes for rows in found])
        of_samples = tensors_of_samples(facts.samples)
        others = [*of_samples, *marked.values(), *inputs, *backwards]
        copy: HostCopy | None = None
        if not all(tensor.is_cpu for tensor in itertools.chain((rows.rows for rows in found), others)):
            patterns = [tensor for rows in found for tensor in rows.tensors()]
            copy = self._copier.copy([*patterns, *others])
            there = iter(copy.tensors)
            found = [_with_tensors(rows, there) for rows in found]
            others = list(there)
        copied, here = iter(found), iter(others)
        calls = [
            TakenCall(
                record.layer,
                call.micro,
                call.call,
                next(copied),
                None if record.values is None else next(copied),
                in_pool,
                not is_elsewhere(record.keys) and self._dtypes[record.layer] is not torch.int8,
            )
            for call, record, in_pool in zip(facts.calls, records, pooled, strict=True)
        ]
        places = [(record.layer, call) for call, record in zip(facts.calls, records, strict=True)]
        samples = samples_in(facts.samples, [next(here) for _ in of_samples])
        marks: StepMarks | None = None
        if self._marker is not None:
            packed = {name: next(here) for name in marked}
            of_inputs = [next(here) for _ in inputs]
            marks = StepMarks(packed, of_inputs, list(here), digest_calls(places), digest_annotations(places))
        return TakenStep(facts.step, calls, places, pattern_bytes, facts.facts, samples, facts.rows, copy, marks, sizes)


def _seed(layer: str, step: int, call: StepCall, rank: int, what: str) -> int:
    """Return the seed of the noise that keys or values of a call are rounded with."""
    return address_seed(layer, what, step, call.micro, call.call, rank)


def _encoded(
    rows: Tensor, dtype: torch.dtype | None, seed: Callable[[str], int], what: str, seen: Tensor | None
) -> TakenRows:
    """Return rows as they go to the CPU's memory from another one: encoded, and large keys with their range.

    To find the range of a few rows takes the processor less time than to start the kernels that would find it.

    Args:
        rows: keys or values, on a GPU.
        dtype: what to store them in; None where they are to be encoded later.
        seed: returns the seed of the noise that keys or values are rounded with.
        what: "keys" or "values".
        seen: what the range of keys is of; None for values.
    """
    ends: tuple[Tensor, ...] = ()
    as_they_are = seen is rows and dtype in (None, rows.dtype)  # so that their range can be found where they arrive
    if seen is not None and seen.numel() and not (as_they_are and rows.nbytes <= MAX_PACKED_BYTES):
        ends = tuple(torch.aminmax(seen))
    if dtype is None:
        return TakenRows(rows, range=ends)
    noise = seed(what) if dtype == torch.int8 else None
    return TakenRows(*encode(rows, dtype, seed=noise), encoded=True, range=ends)


def _with_tensors(rows: TakenRows, tensors: Iterator[Tensor]) -> TakenRows:
    """Return rows with their next tensors, in the order of `TakenRows.tensors`."""
    return TakenRows(
        next(tensors),
        None if rows.scales is None else next(tensors),
        rows.encoded,
        tuple(next(tensors) for _ in rows.range),
    )
