"""`dualform.replay`: run a training again, to prove that it made some weights, or to store more of it."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dualform.errors import ReplayError
from dualform.named_code import find_name
from dualform.progress import bar
from dualform.recording.annotations import Binding
from dualform.recording.keep import Keep, Patterns, Shares, Steps, as_keeps
from dualform.recording.media import Files
from dualform.recording.sinks import CallRecord, PreparedStep, Sink, Start, StepFacts
from dualform.recording.watch import plain_name
from dualform.replaying.joint_replay import find_replaying_world
from dualform.replaying.replay_sink import ReplaySink
from dualform.replaying.replayed_patterns import ReplayedPatterns, run_again
from dualform.replaying.training import Train, record_training
from dualform.store.blobs import Blobs
from dualform.store.format import MANIFEST
from dualform.store.places import as_blobs
from dualform.store.reader import Run
from dualform.store.writer import DiskWriter

MAX_LISTED = 5
"""Number of tensors that differ from the expected ones that a report names."""
SHARD_BYTES = 128 << 20
QUEUE_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class EndDifference:
    """A tensor at the end of a replay that is not the expected one: ‖difference‖, and relative to ‖expected‖."""

    name: str
    size: float
    relative: float


@dataclass(frozen=True, slots=True)
class Replay:
    """The outcome of `dualform.replay`.

    Attributes:
        result: what the training function returned.
        compared: how many tensors of the end were compared with expected ones; 0 where none were expected.
        differences: those that are not equal to the bit, the largest relative difference first.
        unknown: names of expected tensors that the replay does not have, and of its own that are not expected.
    """

    result: Any
    compared: int = 0
    differences: tuple[EndDifference, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether the replay ends with exactly the expected weights."""
        return self.compared > 0 and not self.differences and not self.unknown

    def __str__(self) -> str:
        if not self.compared:
            return "nothing was expected of the end"
        if self.equal:
            return f"the end is the expected one, to the bit, in all of {self.compared} tensors"
        listed = [f"{one.name!r} by {one.size:.1e} ({one.relative:.1e} of its size)" for one in self.differences]
        more = f", and {len(listed) - MAX_LISTED} more" if len(listed) > MAX_LISTED else ""
        apart = f"{len(listed)} of {self.compared} tensors differ: {', '.join(listed[:MAX_LISTED])}{more}"
        lacking = f"only on one side: {', '.join(map(repr, self.unknown[:MAX_LISTED]))}"
        return "; ".join([*([apart] if listed else []), *([lacking] if self.unknown else [])])


def replay(
    train: Train | None,
    path: str | os.PathLike[str] | Blobs,
    *,
    expect: nn.Module | Mapping[str, Tensor] | None = None,
    keep: Keep | Sequence[Keep] | None = None,
    to: str | os.PathLike[str] | Blobs | None = None,
    trust: bool = False,
) -> Replay:
    """Run a training again, and leave a memory of it.

    Without a run in `path` this is for a model that was trained before anybody recorded it: the training is recorded to
    `path`, and its end compared with the expected weights.

        outcome = dualform.replay(train, "runs/lm", expect=torch.load("model.pt", weights_only=True))
        assert outcome.equal, outcome

    With a run of steps in `path`, each step is proved to be the recorded one, and patterns are stored in a new run:

        dualform.replay(train, "runs/lm", keep=dualform.Patterns(layers="head"), to="runs/lm-head")

    Args:
        train: the training function; see `dualform.record_training`. None for the one that the run in `path` remembers.
        path: the run folder, or the `Blobs` that the run is or will be kept in.
        expect: the weights that the training is expected to end with: a model, or its state dict.
        keep: what to store: `Steps()` by default; with a run in `path`, `Patterns(...)`.
        to: with a run in `path`, where the new one goes.
        trust: call the function that the run remembers, wherever it is defined (docs/security.md).
    """
    blobs = as_blobs(path)
    if blobs.exists() and blobs.size(MANIFEST) is not None:
        run = Run(blobs)
        known = ReplayedPatterns(run, train, trust=trust).require_train()
        result = _store(known, run, as_keeps(keep), to)
    elif to is not None or train is None:
        raise ReplayError(
            f"{blobs.location} holds no run to replay. Give the path of a run, or a training function and no `to` to "
            "record a training there."
        )
    else:
        result = record_training(train, blobs, keep=keep)
    return Replay(result) if expect is None else _compared(result, expect)


def _store(train: Train, run: Run, keeps: Sequence[Keep], to: str | os.PathLike[str] | Blobs | None) -> Any:
    """Replay a run of steps, prove it, and store patterns in another run."""
    patterns = [one for one in keeps if isinstance(one, Patterns)]
    if to is None:
        raise ReplayError(
            f"{run.name} holds a run already, and published files never change. Say where the new one goes: "
            'dualform.replay(train, path, keep=Patterns(...), to="runs/new").'
        )
    if any(isinstance(one, Shares) for one in keeps) or len(patterns) != 1:
        raise ReplayError(f"keep is {list(keeps)!r}; of a run of steps, expected keep=Patterns(...).")
    description = run.description
    training = description.training
    writer = DiskWriter(
        as_blobs(to),
        dtype=patterns[0].dtype,
        shard_bytes=SHARD_BYTES,
        queue_bytes=QUEUE_BYTES,
        resume=False,
        steps=run.steps,
        factory=description.factory,
        factory_arguments=description.factory_arguments,
        keep=(Steps(), patterns[0]),
        training=find_name(train) or (None if training is None else training.function),
    )
    with bar("replaying", total=run.steps) as advance:
        world = find_replaying_world(run)
        proof = ReplaySink(run, {}, lambda step, calls: advance(1), steps=run.steps, on_difference="stop", world=world)
        result = run_again(train, _ProvedSink(proof, writer))
    proof.finish()
    return result


class _ProvedSink:
    """A sink that lets another one have only what is proved to be the recorded training."""

    def __init__(self, proof: ReplaySink, sink: DiskWriter) -> None:
        self._proof = proof
        self._sink = sink
        self._both: tuple[Sink, ...] = (proof, sink)

    def open(self, start: Start) -> int:
        self._proof.check_start(start)
        return self._sink.open(start)

    def updates(self) -> Mapping[str, int]:
        return self._sink.updates()

    def check(self, binding: Binding) -> None:
        self._sink.check(binding)

    def call(self, record: CallRecord) -> None:
        for sink in self._both:
            sink.call(record)

    def before_step(self, prepared: PreparedStep) -> None:
        for sink in self._both:
            sink.before_step(prepared)

    def stepped(self, snapshot: Callable[[], dict[str, Tensor]]) -> None:
        self._sink.stepped(snapshot)

    def step(self, facts: StepFacts) -> None:
        for sink in self._both:
            sink.step(facts)

    def discard(self, backwards: Sequence[int]) -> None:
        for sink in self._both:
            sink.discard(backwards)

    def state(self) -> Mapping[str, Any]:
        return self._sink.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._sink.load_state(state)

    def attach(self, files: Files) -> None:
        self._sink.attach(files)

    def flush(self, snapshot: Callable[[], dict[str, Tensor]]) -> None:
        self._sink.flush(snapshot)

    def close(self, final: Mapping[str, Tensor]) -> None:
        for sink in self._both:
            sink.close(final)

    def close_without_final(self, reason: str) -> None:
        for sink in self._both:
            sink.close_without_final(reason)

    def find_step(self, parameters: Mapping[str, Tensor]) -> int | None:
        return self._sink.find_step(parameters)

    def abandon(self) -> None:
        for sink in self._both:
            sink.abandon()


def _compared(result: Any, expect: nn.Module | Mapping[str, Tensor]) -> Replay:
    """Compare the model that a training returned with the expected one."""
    if not isinstance(result, nn.Module):
        raise ReplayError(
            f"The training returned {type(result).__name__}, which cannot be compared with the expected weights. "
            "Let the training function return its model."
        )
    expected, found = (
        {plain_name(name): tensor.detach().cpu() for name, tensor in _state(one).items()} for one in (expect, result)
    )
    shared = [name for name in expected if name in found and expected[name].shape == found[name].shape]
    unknown = [name for name in {**expected, **found} if name not in shared]
    differences = []
    for name in shared:
        if expected[name].dtype != found[name].dtype or not torch.equal(expected[name], found[name]):
            size = float((expected[name].double() - found[name].double()).norm())
            norm = float(expected[name].double().norm())
            differences.append(EndDifference(name, size, size / norm if norm else float("inf")))
    differences.sort(key=lambda one: -one.relative)
    return Replay(result, len(shared), tuple(differences), tuple(unknown))


def _state(one: nn.Module | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    found = one.state_dict() if isinstance(one, nn.Module) else one
    return {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}
