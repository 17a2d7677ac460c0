"""Steps as the disk writer takes them: each call's patterns joined with its place in the step, in the CPU's memory.

Patterns that are on a GPU are encoded there, as they will be stored, before they are copied: fewer bytes have to
come over, and the writer's thread has nothing to compute. Patterns in the CPU's memory are encoded by that thread.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dualform.engine.proofs import ParameterMarker, checksum, digest_annotations, digest_calls
from dualform.recording.annotations import Binding
from dualform.recording.rowcheck import RowCheck
from dualform.recording.sinks import CallRecord, ParameterFacts, StepCall, StepFacts
from dualform.store.host_copy import HostCopier, HostCopy, is_elsewhere
from dualform.store.pool import MIN_POOLED_WIDTH
from dualform.store.row_encoding import address_seed, encode, stored_dtypes


@dataclass(frozen=True, slots=True)
class TakenRows:
    """Keys or values of a call.

    Attributes:
        rows: (T, d), as they were trained with or as they are stored.
        scales: of stored rows that have some, (T,) float32.
        encoded: whether the rows are as they are stored.
        range: the least and the greatest element of keys, (2,) float64, where a GPU has found them.
    """

    rows: Tensor
    scales: Tensor | None = None
    encoded: bool = False
    range: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.rows.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that are there, in a fixed order."""
        return [tensor for tensor in (self.rows, self.scales, self.range) if tensor is not None]


@dataclass(frozen=True, slots=True)
class TakenCall:
    """The patterns of one call, and where they are in the step; the fields are those of `CallRecord` and `StepCall`.

    Attributes beside those:
        pooled: whether the layer's identical keys are stored once.
    """

    layer: str
    micro: int
    call: int
    rows: int
    positions: int
    inner: int
    keys: TakenRows  # (rows × positions, d_in)
    values: TakenRows | None  # (rows × positions, d_out)
    binding: Binding | None
    layout: str | None
    pooled: bool

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values in memory."""
        return self.keys.nbytes + (0 if self.values is None else self.values.nbytes)


@dataclass(frozen=True, slots=True)
class StepMarks:
    """The marks by which a step is recognised when the training is run again (`dualform.engine.proofs`).

    Attributes:
        parameters: the packed mark of each parameter after the step.
        inputs: the checksum of the keys of each call whose keys owe nothing to the parameters, (1,) each.
        calls: the digest of the step's calls.
        annotations: the digest of the calls' annotations.
    """

    parameters: Mapping[str, Tensor]
    inputs: Sequence[Tensor]
    calls: str
    annotations: str


@dataclass(slots=True)
class TakenStep:
    """One step to write. Its tensors may be looked at after `wait` and before `release`."""

    step: int
    calls: Sequence[TakenCall]
    facts: Sequence[ParameterFacts]
    samples: Mapping[str, Tensor]
    rows: Mapping[str, RowCheck]
    copy: HostCopy | None  # until it is released: it refers to all tensors
    marks: StepMarks | None = None  # where the training is to be run again

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values in memory; of samples too in a run that stores few patterns or none."""
        samples = () if self.marks is None else self.samples.values()
        return sum(call.nbytes for call in self.calls) + sum(sample.nbytes for sample in samples)

    def wait(self) -> None:
        """Return when patterns and samples are here: they may be on their way from a GPU."""
        if self.copy is not None:
            self.copy.wait()

    def release(self) -> None:
        """Let go of the patterns, so that their memory can be used again."""
        self.copy, self.calls = None, ()


class PooledLayers:
    """Says which layers' identical keys are stored once: those whose first patterns are worth it, for good."""

    def __init__(self, seen: Collection[str] = (), pooled: Collection[str] = ()) -> None:
        """Begin with the layers that a resumed run has patterns of, and those among them that have a pool."""
        self._decided = {name: name in pooled for name in seen}

    def has(self, record: CallRecord, call: StepCall) -> bool:
        """Say whether a call's layer has a pool; the layer's first call decides."""
        decided = self._decided.get(record.layer)
        if decided is None:
            wide = record.keys.is_floating_point() and record.keys.shape[1] >= MIN_POOLED_WIDTH
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
        marker: ParameterMarker | None = None,
    ) -> None:
        """Take calls.

        Args:
            dtypes: layer -> the dtype that it is stored in.
            pooled: says which layers' identical keys are stored once.
            unstored: the layers whose patterns are let go of at once; only their calls' places are kept.
            marker: marks the parameters after each step; None where the training is not to be run again.
        """
        self._dtypes = dtypes
        self._pooled = pooled
        self._unstored = frozenset(unstored)
        self._marker = marker
        self._copier = HostCopier()
        self._records: dict[int, CallRecord] = {}  # by number
        self._inputs: dict[int, Tensor] = {}  # checksums of keys that owe nothing to the parameters, by number

    def add(self, record: CallRecord) -> None:
        """Take a call that was just accumulated."""
        if self._marker is not None and record.raw:
            self._inputs[record.number] = checksum(record.keys)
        if record.layer in self._unstored:
            record = dataclasses.replace(record, keys=record.keys.new_empty(0, record.keys.shape[1]), values=None)
        self._records[record.number] = record

    def discard(self, backwards: Sequence[int]) -> None:
        """Let go of the calls of some backwards."""
        gone = set(backwards)
        self._records = {number: one for number, one in self._records.items() if one.backward not in gone}
        self._inputs = {number: one for number, one in self._inputs.items() if number in self._records}

    def clear(self) -> None:
        """Let go of everything."""
        self._records, self._inputs = {}, {}

    def nbytes(self) -> int:
        """Return the bytes of all patterns, as they will be in the CPU's memory."""
        return sum(self._nbytes(record) for record in self._records.values())

    def _nbytes(self, record: CallRecord) -> int:
        if not is_elsewhere(record.keys):
            return record.nbytes
        size = self._dtypes[record.layer].itemsize
        both = [record.keys] if record.values is None else [record.keys, record.values]
        return sum(size * rows.numel() if rows.is_floating_point() else rows.nbytes for rows in both)

    def join(self, facts: StepFacts) -> TakenStep:
        """Return a step with its patterns, on their way to the CPU's memory where they are not there."""
        records = [self._records[call.number] for call in facts.calls]
        pooled = [
            record.layer not in self._unstored and self._pooled.has(record, call)
            for record, call in zip(records, facts.calls, strict=True)
        ]
        found: list[TakenRows] = []
        for call, record, in_pool in zip(facts.calls, records, pooled, strict=True):
            of_keys, of_values = stored_dtypes(self._dtypes[record.layer], pooled=in_pool)
            seed = partial(_seed, record.layer, facts.step, call)
            # Keys of a pool are known by the bytes that were trained with.
            found.append(_taken(call.keys_of(record), None if in_pool else of_keys, seed, "keys"))
            if record.values is not None:
                found.append(_taken(record.values, of_values, seed, "values"))
        marked = {} if self._marker is None else self._marker.measure(facts.parameters)
        inputs = [self._inputs[call.number] for call in facts.calls if call.number in self._inputs]
        patterns = [tensor for rows in found for tensor in rows.tensors()]
        copy = self._copier.copy([*patterns, *facts.samples.values(), *marked.values(), *inputs])
        here = iter(copy.tensors)
        copied = iter([_with_tensors(rows, here) for rows in found])
        calls = [
            TakenCall(
                layer=record.layer,
                micro=call.micro,
                call=call.call,
                rows=call.rows,
                positions=call.positions,
                inner=call.inner,
                keys=next(copied),
                values=None if record.values is None else next(copied),
                binding=call.binding,
                layout=call.layout,
                pooled=in_pool,
            )
            for call, record, in_pool in zip(facts.calls, records, pooled, strict=True)
        ]
        samples = {name: next(here) for name in facts.samples}
        marks: StepMarks | None = None
        if self._marker is not None:
            placed = [(record.layer, call) for call, record in zip(facts.calls, records, strict=True)]
            packed = {name: next(here) for name in marked}
            marks = StepMarks(packed, list(here), digest_calls(placed), digest_annotations(placed))
        return TakenStep(facts.step, calls, facts.facts, samples, facts.rows, copy, marks)


def _seed(layer: str, step: int, call: StepCall, what: str) -> int:
    """Return the seed of the noise that keys or values of a call are rounded with."""
    return address_seed(layer, what, step, call.micro, call.call)


def _taken(rows: Tensor, dtype: torch.dtype | None, seed: Callable[[str], int], what: str) -> TakenRows:
    """Return rows as they go to the CPU's memory: from another one with the range of keys, and encoded.

    Args:
        rows: keys or values.
        dtype: what to store them in; None where they are to be encoded later.
        seed: returns the seed of the noise that keys or values are rounded with.
        what: "keys" or "values".
    """
    if not is_elsewhere(rows):
        return TakenRows(rows)
    ends = torch.stack(torch.aminmax(rows)).double() if what == "keys" and rows.numel() else None
    if dtype is None:
        return TakenRows(rows, range=ends)
    return TakenRows(*encode(rows, dtype, seed=seed(what)), encoded=True, range=ends)


def _with_tensors(rows: TakenRows, tensors: Iterator[Tensor]) -> TakenRows:
    """Return rows with their next tensors, in the order of `TakenRows.tensors`."""
    return TakenRows(
        next(tensors),
        None if rows.scales is None else next(tensors),
        rows.encoded,
        None if rows.range is None else next(tensors),
    )
