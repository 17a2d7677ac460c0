"""Steps as the disk writer takes them: each call's patterns joined with its place in the step, in the CPU's memory."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from dualform.engine.proofs import ParameterMarker, checksum, digest_annotations, digest_calls
from dualform.recording.annotations import Binding
from dualform.recording.rowcheck import RowCheck
from dualform.recording.sinks import CallRecord, ParameterFacts, StepFacts
from dualform.store.host_copy import HostCopier, HostCopy


@dataclass(frozen=True, slots=True)
class TakenCall:
    """The patterns of one call, and where they are in the step; the fields are those of `CallRecord` and `StepCall`."""

    layer: str
    micro: int
    call: int
    rows: int
    positions: int
    inner: int
    keys: Tensor  # (rows × positions, d_in)
    values: Tensor | None  # (rows × positions, d_out)
    binding: Binding | None
    raw: bool
    layout: str | None

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
        copy, self.copy, self.calls = self.copy, None, ()
        if copy is not None:
            copy.release()


class AccumulatedCalls:
    """The calls that were accumulated and may reach a step to come.

    Attributes:
        unstored: the layers whose patterns are let go of at once; only their calls' places are kept.
        marker: marks the parameters after each step; None where the training is not to be run again.
    """

    def __init__(self) -> None:
        self.unstored: frozenset[str] = frozenset()
        self.marker: ParameterMarker | None = None
        self._copier = HostCopier()
        self._records: dict[int, CallRecord] = {}  # by number
        self._inputs: dict[int, Tensor] = {}  # checksums of keys that owe nothing to the parameters, by number

    def add(self, record: CallRecord) -> None:
        """Take a call that was just accumulated."""
        if self.marker is not None and record.raw:
            self._inputs[record.number] = checksum(record.keys)
        if record.layer in self.unstored:
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

    def join(self, facts: StepFacts) -> TakenStep:
        """Return a step with its patterns, on their way to the CPU's memory where they are not there."""
        records = [self._records[call.number] for call in facts.calls]
        keys = [call.keys_of(record) for call, record in zip(facts.calls, records, strict=True)]
        values = [record.values for record in records if record.values is not None]
        marked = {} if self.marker is None else self.marker.measure(facts.parameters)
        inputs = [self._inputs[call.number] for call in facts.calls if call.number in self._inputs]
        copy = self._copier.copy([*keys, *values, *facts.samples.values(), *marked.values(), *inputs])
        host_keys, rest = copy.tensors[: len(keys)], copy.tensors[len(keys) :]
        host_values = iter(rest[: len(values)])
        calls = [
            TakenCall(
                layer=record.layer,
                micro=call.micro,
                call=call.call,
                rows=call.rows,
                positions=call.positions,
                inner=call.inner,
                keys=host_key,
                values=None if record.values is None else next(host_values),
                binding=call.binding,
                raw=record.raw,
                layout=call.layout,
            )
            for call, record, host_key in zip(facts.calls, records, host_keys, strict=True)
        ]
        here = iter(rest[len(values) :])
        samples = {name: next(here) for name in facts.samples}
        marks: StepMarks | None = None
        if self.marker is not None:
            placed = [(record.layer, call) for call, record in zip(facts.calls, records, strict=True)]
            packed = {name: next(here) for name in marked}
            marks = StepMarks(packed, list(here), digest_calls(placed), digest_annotations(placed))
        return TakenStep(facts.step, calls, facts.facts, samples, facts.rows, copy, marks)
