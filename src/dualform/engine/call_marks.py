"""Marks of the calls of a training, kept from the moment when each is accumulated until its step comes.

Inputs that owe nothing to the parameters tell two batches apart. Where none are recorded, two micro-batches that have
changed places, or the rows of two processes, move every parameter alike: a + b is b + a to the bit. So the first call
of each backward is marked too, by what it took and by the errors that came: these owe something to everything else.
"""

from collections.abc import Sequence

from torch import Tensor

from dualform.engine.proofs import checksum, tensor_checksum
from dualform.recording.sinks import CallRecord


class CallMarks:
    """Marks calls as they are accumulated."""

    def __init__(self) -> None:
        self._inputs: dict[int, tuple[int, Tensor]] = {}  # number of a call -> its backward, and a checksum
        self._backwards: dict[int, list[Tensor]] = {}  # number of a backward -> checksums of its first call

    def add(self, record: CallRecord) -> None:
        """Mark a call that was just accumulated."""
        if record.raw:
            self._inputs[record.number] = record.backward, checksum(record.keys)
        if record.first is not None:
            self._backwards[record.backward] = [tensor_checksum(one) for one in record.first()]

    def of_step(self, records: Sequence[CallRecord]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the marks of a step's calls, (1,) each: of the inputs of its network, and of its backwards."""
        inputs = [self._inputs[record.number][1] for record in records if record.number in self._inputs]
        backwards = dict.fromkeys(record.backward for record in records)
        return inputs, [mark for backward in backwards for mark in self._backwards.get(backward, ())]

    def discard(self, backwards: Sequence[int]) -> None:
        """Let go of the calls of some backwards."""
        gone = set(backwards)
        self._inputs = {number: one for number, one in self._inputs.items() if one[0] not in gone}
        self._backwards = {number: one for number, one in self._backwards.items() if number not in gone}

    def clear(self) -> None:
        """Let go of everything."""
        self._inputs, self._backwards = {}, {}
