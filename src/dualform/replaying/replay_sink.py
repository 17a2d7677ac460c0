"""The sink of a replay: proves each step of a training that is run again, and hands its patterns on."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from dualform.engine.call_marks import CallMarks
from dualform.engine.proofs import ParameterMark, ParameterMarker, mark_checksum, unpack_mark
from dualform.errors import DualformError, ReplayError
from dualform.recording.annotations import Binding
from dualform.recording.media import Files
from dualform.recording.rowcheck import RowCheck
from dualform.recording.sinks import CallRecord, ParameterFacts, PreparedStep, Start, StepCall, StepFacts
from dualform.recording.watch import What
from dualform.recording.world import OneProcess, World
from dualform.replaying.joint_replay import UnsureRowsError, alone, exchange
from dualform.replaying.step_proof import Difference, StepProof
from dualform.store.reader import Run
from dualform.store.resume import count_updates

T = TypeVar("T")
OnDifference = Literal["stop", "report"]
PROVED_TOGETHER = 16
"""Number of steps on a GPU that are proved at once: to look at each by itself would make the GPU wait."""


class ReplayEnded(ReplayError):
    """Ends a training that is run again when all steps that were asked for are there."""


@dataclass(frozen=True, slots=True)
class ReplayedCall:
    """The patterns of one call of a wanted layer in a replayed step."""

    layer: str
    keys: Tensor  # (n, d_in), on the training device
    values: Tensor | None  # (n, d_out)

    def sent(self) -> "ReplayedCall":
        """Return the call as it is sent to another process."""
        return ReplayedCall(self.layer, alone(self.keys), None if self.values is None else alone(self.values))

    def on(self, device: torch.device) -> "ReplayedCall":
        """Return the call with its patterns on a device."""
        return ReplayedCall(self.layer, self.keys.to(device), None if self.values is None else self.values.to(device))


@dataclass(frozen=True, slots=True)
class _Unproved:
    """A step whose marks are still to be compared."""

    step: int
    calls: Sequence[tuple[str, StepCall]]
    inputs: Sequence[Tensor]
    backwards: Sequence[Tensor]
    facts: Sequence[ParameterFacts]
    marks: Mapping[str, Tensor]


class ReplaySink:
    """A sink that stores nothing.

    Attributes:
        difference: the first difference from the recorded training; None where there is none so far.
        drift: how far each parameter was at most from the recorded one, relative to its size; empty where all agree.
        steps: how many steps were taken so far.
        needed: the layers whose patterns are handed on, each with the rows that are needed of it.
        rows: the layers that are known not to have the batch's rows; None where the layers' rows are tried again.
        processes: how many processes run the training again together.
    """

    _failure: Exception | None = None  # the error that ended the replay, which the training may have caught
    _told = False  # whether all processes know that it has ended

    def __init__(
        self,
        run: Run,
        layers: Mapping[str, What],
        take: Callable[[int, Sequence[ReplayedCall]], None],
        *,
        steps: int,
        on_difference: OnDifference,
        first: int = 0,
        rows: Mapping[str, RowCheck] | None = None,
        world: World | None = None,
    ) -> None:
        """Prepare a replay.

        Args:
            run: the recorded run.
            layers: the layers whose patterns are handed on, each with the rows that are needed of it.
            take: takes the number of a step and its patterns, in the order of its calls.
            steps: how many steps are wanted; the training is ended behind them.
            on_difference: whether to end a replay that is not the recorded training, or to measure how far it drifts.
            first: the number of the first step that comes; the training starts in the middle where it is not 0.
            rows: the layers that are known not to have the batch's rows; None where the layers' rows are tried again.
            world: the processes that run the training again together; this one alone by default.
        """
        self._world = OneProcess() if world is None else world
        self.processes = self._world.size
        self.difference: Difference | None = None
        self.drift: dict[str, float] = {}
        self.steps = first
        self._run = run
        self._proof = StepProof(run, self._world.rank)
        self._marker = ParameterMarker()
        self.needed = layers
        self.rows = rows
        self._take = take
        self._wanted = steps
        self._on_difference = on_difference
        self._records: dict[int, CallRecord] = {}
        self._call_marks = CallMarks()
        self._unproved: list[_Unproved] = []

    def open(self, start: Start) -> int:
        """Compare the start of the training with that of the run."""
        self._together(lambda: self.check_start(start))
        if not self._wanted:
            raise ReplayEnded("No step of this training is asked for.")
        return self.steps

    def check_start(self, start: Start) -> None:
        """Compare the start of this process's training with that of the run."""
        if self.steps:
            self._meet(self._proof.check_restart(start, self.steps))
        else:
            self._meet(self._proof.check_start(start))

    def _together(self, find: Callable[[], T]) -> list[T]:
        """Return what all processes have found, or end the replay in all of them where one has failed."""
        try:
            return exchange(self._world, find)
        except Exception as error:
            self._failure, self._told = error, True
            if isinstance(error, DualformError):
                raise
            raise ReplayEnded("The question that the training is run for has failed.") from error

    def updates(self) -> Mapping[str, int]:
        """Return how many updates of each parameter come before the first step of a replay that starts later."""
        return count_updates(self._run, self.steps)

    def check(self, binding: Binding) -> None:
        """Take any columns: they are compared with the recorded ones at the step."""

    def call(self, record: CallRecord) -> None:
        """Keep a call's patterns until their step, if its layer is wanted."""
        self._call_marks.add(record)
        record = record.without_first()
        if record.layer not in self.needed:
            record = record._replace(keys=record.keys.new_empty(0, record.keys.shape[1]), values=None)
        self._records[record.number] = record

    def before_step(self, prepared: PreparedStep) -> None:
        """Do nothing: the facts come with the step."""

    def stepped(self, snapshot: Callable[[], dict[str, Tensor]]) -> None:
        """Do nothing: the parameters are the same until the step comes."""

    def step(self, facts: StepFacts) -> None:
        """Prove a step, and hand its patterns on."""
        if self.steps >= self._wanted or (self._failure is not None and (self._told or self._world.size == 1)):
            raise ReplayEnded("All steps that were asked for are there.")
        wanted = self._proved_together(facts)
        try:
            self._take(facts.step, wanted)
        except Exception as error:  # of the question, not of the training
            self._failure = error
            if self._world.size == 1:  # several processes hear of it when they meet after the next step
                raise ReplayEnded("The question that the training is run for has failed.") from error
        self.steps = facts.step + 1
        if self.steps >= self._wanted and self._wanted < self._run.steps:
            self._prove()
            raise ReplayEnded("All steps that were asked for are there.")

    def _proved_together(self, facts: StepFacts) -> list[ReplayedCall]:
        """Prove a step in all processes, and return the wanted calls of all of them, in the order of ranks."""
        if self._world.size == 1:
            return self._proved(facts)
        own: list[ReplayedCall] = []

        def find() -> list[ReplayedCall]:
            if self._failure is not None:
                raise self._failure
            own.extend(self._proved(facts))
            return [call.sent() for call in own]

        found = self._together(find)
        device = next(iter(facts.parameters.values())).device
        found[self._world.rank] = own
        return [call.on(device) for calls in found for call in calls]

    def _proved(self, facts: StepFacts) -> list[ReplayedCall]:
        """Prove a step of this process, and return its wanted calls."""
        records = [self._records[call.number] for call in facts.calls]
        placed = [(record.layer, call) for call, record in zip(facts.calls, records, strict=True)]
        inputs, backwards = self._call_marks.of_step(records)
        if all(parameter.is_cpu for parameter in facts.parameters.values()):
            self._prove_now(facts, placed, [int(one) for one in inputs], [int(one) for one in backwards])
        else:
            marks = self._marker.measure(facts.parameters)
            self._unproved.append(_Unproved(facts.step, placed, inputs, backwards, facts.facts, marks))
            if len(self._unproved) >= PROVED_TOGETHER or self._world.size > 1:  # several wait for each other anyway
                self._prove()
        return [
            ReplayedCall(record.layer, call.keys_of(record), record.values)
            for call, record in zip(facts.calls, records, strict=True)
            if record.layer in self.needed
        ]

    def discard(self, backwards: Sequence[int]) -> None:
        """Let go of the patterns of some backwards."""
        gone = set(backwards)
        self._records = {number: one for number, one in self._records.items() if one.backward not in gone}
        self._call_marks.discard(backwards)

    def state(self) -> Mapping[str, Any]:
        """Return nothing: a replay is never continued."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Do nothing: a replay begins at the first step."""

    def attach(self, files: Files) -> None:
        """Do nothing: the run has its files already."""

    def flush(self, snapshot: Callable[[], dict[str, Tensor]]) -> None:
        """Prove the steps so far."""
        self._prove()

    def close(self, final: Mapping[str, Tensor]) -> None:
        """Prove the last steps."""
        self._prove()

    def close_without_final(self, reason: str) -> None:
        """Prove the last steps."""
        self._prove()

    def find_step(self, parameters: Mapping[str, Tensor]) -> int | None:
        """Return nothing: no step is published."""
        return None

    def abandon(self) -> None:
        """Let go of all patterns."""
        self._records = {}
        self._call_marks.clear()

    def finish(self) -> None:
        """Raise what ended the replay, or where it has fewer steps than the recorded training."""
        if not self._told:
            with contextlib.suppress(ReplayEnded):
                self._together(self._check_end)
        if self._failure is not None:
            raise self._failure

    def _check_end(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._prove()
        if self.steps < self._wanted:
            found = self._proof.check_length(self.steps)
            assert found is not None, "no replay is asked for more steps than were recorded"
            raise ReplayError(str(found))

    def known_factors(self, step: int) -> Mapping[str, Sequence[float]]:
        """Return the factors of gradients in a recorded step, by parameter."""
        return self._proof.known_factors(step)

    def _prove_now(
        self,
        facts: StepFacts,
        placed: Sequence[tuple[str, StepCall]],
        inputs: Sequence[int],
        backwards: Sequence[int],
    ) -> None:
        """Compare a step whose parameters are in the CPU's memory; how far off one is, is found where it differs."""
        parameters = facts.parameters
        checksums = {name: mark_checksum(parameter) for name, parameter in parameters.items()}

        def mark_of(name: str) -> ParameterMark:
            return unpack_mark(self._marker.measure({name: parameters[name]})[name])

        self._meet(self._proof.check_step(facts.step, placed, inputs, backwards, facts.facts, checksums, mark_of))

    def _prove(self) -> None:
        """Compare the marks of the steps that came since the last time."""
        unproved, self._unproved = self._unproved, []
        here = iter(_to_host([t for one in unproved for t in (*one.inputs, *one.backwards, *one.marks.values())]))
        for one in unproved:
            inputs, backwards = ([int(next(here)) for _ in some] for some in (one.inputs, one.backwards))
            marks = {name: unpack_mark(next(here)) for name in one.marks}
            checksums = {name: mark.checksum for name, mark in marks.items()}
            self._meet(
                self._proof.check_step(one.step, one.calls, inputs, backwards, one.facts, checksums, marks.__getitem__)
            )

    def _meet(self, found: Difference | None) -> None:
        """End the replay at a difference, or remember it."""
        if found is None:
            return
        if self.rows is not None and found.what in ("calls", "annotations"):
            self._failure = UnsureRowsError(str(found))
            raise self._failure
        self.difference = found if self.difference is None else self.difference
        # Patterns of other calls, or with other annotations, have no place among the recorded ones.
        if self._on_difference == "stop" or found.what in ("calls", "annotations"):
            self._failure = ReplayError(str(found))
            raise self._failure
        if found.parameter is not None:
            self.drift[found.parameter] = max(found.relative, self.drift.get(found.parameter, 0.0))


def _to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return small tensors in the CPU's memory, by one copy where they are elsewhere."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return list(tensors)
    sizes = [tensor.numel() for tensor in tensors]
    whole = torch.cat([tensor.view(torch.int64) for tensor in tensors]).cpu()
    return [part.view(tensor.dtype) for part, tensor in zip(whole.split(sizes), tensors, strict=True)]
