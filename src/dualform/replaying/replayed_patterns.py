"""`ReplayedPatterns`: a recorded run whose patterns come back when its training is run again.

Everything but keys and values is read from the run: facts of the steps, calls, annotations, the parameters at the start
and at the end. Keys and values of a layer are there while a replay goes by them, or as long as they are held.
"""

import contextlib
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.engine.addresses import Calls
from dualform.engine.answer_cache import AnswerCache
from dualform.engine.description import RunDescription
from dualform.engine.share_source import ShareSource
from dualform.engine.source import Cost, DerivedSums, Factors, PatternPart, PatternSource, Rows, RunFiles, Which
from dualform.engine.walk_back import RetracedStep, VisitStep
from dualform.errors import QueryError, ReplayError
from dualform.identity.families import Facts
from dualform.identity.parameter_use import takes_ids
from dualform.named_code import RememberedFunction
from dualform.progress import bar
from dualform.recording.proven_steps import KnownSteps
from dualform.recording.recorder import Recorder
from dualform.recording.rowcheck import RowCheck
from dualform.recording.sinks import Sink
from dualform.recording.user_warnings import warn_user
from dualform.recording.watch import What
from dualform.recording.world import World
from dualform.replaying.joint_replay import (
    SumsOfProcesses,
    common_start,
    find_replaying_world,
    require_same_question,
)
from dualform.replaying.replay_sink import OnDifference, ReplayedCall, ReplayEnded, ReplaySink
from dualform.replaying.restart_points import RestartPoints
from dualform.replaying.restartable import Restartable
from dualform.replaying.training import OneRecording, Recording, Train
from dualform.replaying.walked_back import StateWatch, walk_training_back
from dualform.store.reader import Run
from dualform.torch_modes import call_without_autocast, with_gradients, without_filling

RECORDER_OPTIONS = ("layers", "strict", "batch_axis", "check_rows")
"""Options of `dualform.record` that decide what is recorded; the others say how it is stored."""
HELD_BYTES = 256 << 20
"""Size of the patterns of a question's layers up to which they stay in memory after a replay, for the next question."""
WINDOW_BYTES = 16 << 20
"""Size of keys and values of replayed steps that are looked at together: many small steps cost more one by one."""


GPU_WINDOW_BYTES = 3 << 29
"""The same on a GPU, at most; and at most an eighth of its free memory. Its kernels cost more to start than to run."""


class ReplayWarning(UserWarning):
    """A replay drifts from the recorded training, as far as the message says."""


class ReplayedPart(PatternPart):
    """A range of steps: what is stored of it, and those of its patterns that a replay has just brought.

    Attributes:
        windows: layer -> the number of the first pattern that is here, keys (n, d_in) and values (n, d_out).
    """

    def __init__(self, source: "ReplayedPatterns", shard: PatternPart) -> None:
        self.index, self.start, self.stop = shard.index, shard.start, shard.stop
        self.windows: dict[str, tuple[int, Tensor, Tensor | None]] = {}
        self._source = source
        self._shard = shard

    def calls(self, layer: str) -> Calls:
        """Return a layer's calls, as they were recorded."""
        return self._shard.calls(layer)

    def count(self, layer: str) -> int:
        """Return how many patterns of a layer there are in these steps."""
        return self._shard.count(layer)

    def annotation(self, name: str, *, keep: bool = True) -> pa.ChunkedArray | None:
        """Return one of the user's columns, as it was recorded."""
        return self._shard.annotation(name, keep=keep)

    def rows(self, layer: str, what: Literal["keys", "values"]) -> Rows:
        """Return a layer's keys or values: stored ones, or those that a replay has brought when some are taken."""
        if self._source.is_stored(layer):
            return self._shard.rows(layer, what)
        return ReplayedRows(self, layer, what, self._source.row_dtype(layer, what))

    def bring(self, layer: str, index: slice | Tensor) -> None:
        """See to it that some patterns are here, where the training can start anywhere and its patterns are paged in.

        All steps between the restart points around these patterns are replayed; patterns of other steps are let go of.
        """
        if layer not in self._source.paged:
            return
        if isinstance(index, slice):
            low, high, _ = index.indices(self.count(layer))
        else:
            low, high = (int(index.min()), int(index.max()) + 1) if len(index) else (0, 0)
        window = self.windows.get(layer)
        if low >= high or (window is not None and window[0] <= low and high <= window[0] + len(window[1])):
            return
        calls = self.calls(layer)
        ends = calls["offset"] + calls["rows"] * calls["positions"]
        steps = calls["step"][(calls["offset"] < high) & (ends > low)]
        self._source.page_in(range(int(steps.min()), int(steps.max()) + 1), self)

    def rows_before(self, layer: str, step: int) -> int:
        """Return how many patterns of a layer in this part come before a step."""
        calls = self.calls(layer)
        return int((calls["rows"] * calls["positions"])[calls["step"] < step].sum())

    def key_range(self, layer: str) -> tuple[float, float] | None:
        """Return the range of a layer's keys; without bounds where they are not stored."""
        if self._source.is_stored(layer):
            return self._shard.key_range(layer)
        return (-np.inf, np.inf) if self.count(layer) else None

    def key_ids(self, layer: str) -> Tensor | None:
        """Return the number of each pattern's key among the layer's distinct keys, where they are stored."""
        return self._shard.key_ids(layer)

    def own_keys(self, layer: str) -> tuple[int, Rows] | None:
        """Return the distinct keys that came first in this part, where they are stored."""
        return self._shard.own_keys(layer)

    def stored_bytes(self, layer: str) -> int:
        """Return how many bytes a layer's patterns take where they are stored."""
        return self._shard.stored_bytes(layer)


class ReplayedRows:
    """Keys or values of one layer in one part; those that are here can be taken."""

    def __init__(self, part: ReplayedPart, layer: str, what: Literal["keys", "values"], dtype: torch.dtype) -> None:
        self._part = part
        self._layer = layer
        self._what = what
        self.dtype = dtype

    def __len__(self) -> int:
        return self._part.count(self._layer)

    def take(self, index: slice | Tensor, into: Tensor | None = None) -> tuple[Tensor, None]:
        """Return some rows that a replay has brought."""
        self._part.bring(self._layer, index)
        window = self._part.windows.get(self._layer)
        found = None if window is None else window[1] if self._what == "keys" else window[2]
        if window is None or found is None:
            raise ReplayError(
                f"The {self._what} of layer {self._layer!r} are not stored: they come back when the training is "
                "replayed. Ask through a memory that dualform.open returned, whose executor replays."
            )
        first = window[0]
        if isinstance(index, slice):
            start, stop, _ = index.indices(len(self))
            low, high, place = start - first, max(start, stop) - first, slice(start - first, max(start, stop) - first)
            rows = found[place] if 0 <= low <= high <= len(found) else None
        else:
            shifted = index - first
            inside = not len(index) or (int(shifted.min()) >= 0 and int(shifted.max()) < len(found))
            rows = found[shifted.to(found.device)] if inside else None
        if rows is None:
            raise ReplayError(
                f"The {self._what} of layer {self._layer!r} that are asked for are not those that the replay is at: it "
                "only goes forwards. Ask through a memory that dualform.open returned."
            )
        return rows, None


class ReplayedPatterns(PatternSource):
    """A recorded run, and the training that brings its patterns back.

    Attributes:
        run: the run, as it is stored.
        replays: how many times the training was run again so far.
        held: the layers whose patterns are held in memory.
        paged: the layers whose patterns are replayed, a few steps at a time, wherever they are asked for.
        tries_rows: whether a replay tries the layers' rows as the recording did, because what the recording says of
            them at its end does not tell where they were in each step.
    """

    def __init__(
        self,
        run: Run,
        train: Train | None = None,
        *,
        trust: bool = False,
        on_difference: OnDifference = "stop",
        held_bytes: int = HELD_BYTES,
    ) -> None:
        """Open a run.

        Args:
            run: the run.
            train: its training; by default the function that the run remembers.
            trust: import and call the function that the run remembers, wherever it is defined.
            on_difference: what to do where a replay is not the recorded training.
            held_bytes: how many bytes of patterns may stay in memory after a replay, for the next question.
        """
        if on_difference not in ("stop", "report"):
            raise ValueError(f'on_difference is {on_difference!r}; expected "stop" or "report".')
        self.run = run
        self.replays = 0
        self.held: frozenset[str] = frozenset()
        self.paged: frozenset[str] = frozenset()
        self.tries_rows = known_rows(run.description) is None
        self._train = train
        self._trust = trust
        self._on_difference = on_difference
        self._held_bytes = held_bytes
        self._parts = tuple(ReplayedPart(self, part) for part in run.parts())

    @property
    def description(self) -> RunDescription:
        """What was trained."""
        return self.run.description

    @property
    def digest(self) -> str:
        """A digest of everything in the run that answers depend on.

        A replay that may differ from the recorded training gives answers of its own.
        """
        return self.run.digest if self._on_difference == "stop" else f"{self.run.digest} or near it"

    @property
    def name(self) -> str:
        """The path of the run folder, or how its place is called."""
        return self.run.name

    def parts(self) -> Sequence[ReplayedPart]:
        """Return the parts in the order of steps."""
        return self._parts

    def facts(self, parameter: str) -> tuple[Facts, Factors]:
        """Return what the optimizer did to a parameter, and its gradient's factors."""
        return self.run.facts(parameter)

    def tensors(self, which: Which) -> Mapping[str, Tensor] | None:
        """Return the covered parameters at the start or at the end."""
        return self.run.tensors(which)

    @property
    def initial_states(self) -> Mapping[str, Mapping[str, Tensor]]:
        """The optimizer state that was warm at the start."""
        return self.run.initial_states

    @property
    def run_files(self) -> RunFiles:
        """The files of the run that are no patterns."""
        return self.run.run_files

    @property
    def kept_shares(self) -> ShareSource | None:
        """Exact sums by group that the run keeps itself."""
        return self.run.kept_shares

    @property
    def steps_table(self) -> pa.Table:
        """The optimizer facts of every (step, parameter)."""
        return self.run.steps_table

    @property
    def derived_sums(self) -> DerivedSums | None:
        """Where tensors that were computed from the patterns are kept; nowhere where a replay may differ."""
        if self._on_difference != "stop":
            return None
        return self.run.derived_sums if self.description.processes == 1 else SumsOfProcesses(self.run.derived_sums)

    @cached_property
    def answers(self) -> AnswerCache:
        """The answers of replays, by what was asked."""
        return AnswerCache(self)

    def cost(self, layers: Collection[str], rounds: int) -> Cost:
        """Say what a question takes: a replay for each round of jobs, or one where all patterns can be held."""
        unstored = frozenset(name for name in layers if not self.is_stored(name) and self.count(name))
        needed = 0 if unstored <= self.held else 1 if self.can_hold(unstored | self.held) else rounds
        stored = super().cost([name for name in layers if self.is_stored(name)], rounds)
        size = stored.bytes + needed * sum(map(self.pattern_bytes, unstored))
        return Cost(replays=needed, seconds=needed * self.recorded_seconds, bytes=size)

    def can_hold(self, layers: Collection[str]) -> bool:
        """Say whether all patterns of some layers may stay in memory."""
        return sum(map(self.pattern_bytes, layers)) <= self._held_bytes

    def is_stored(self, layer: str) -> bool:
        """Say whether a layer's patterns are stored, so that they need no replay."""
        return self.description.layers[layer].store != "steps"

    def row_dtype(self, layer: str, what: Literal["keys", "values"]) -> torch.dtype:
        """Return the dtype of a layer's keys or values as a replay brings them."""
        entry = self.description.layers[layer]
        if what == "keys" and takes_ids(entry.uses):
            return torch.int64
        dtype: torch.dtype = getattr(torch, entry.dtype)
        return dtype

    def pattern_bytes(self, layer: str) -> int:
        """Return how many bytes all keys and values of a layer take."""
        entry = self.description.layers[layer]
        keys, values = (self.row_dtype(layer, what).itemsize for what in ("keys", "values"))
        return self.count(layer) * (keys * entry.d_in + values * entry.d_out)

    def hold(self, layers: Collection[str]) -> None:
        """Keep all patterns of some layers in memory, by one replay; nothing else is held afterwards."""
        self.release()
        wanted = frozenset(layers)
        needed: dict[str, What] = dict.fromkeys(wanted, "keys+values")
        self.replay(needed, lambda part, steps: None, steps=self.steps, hold=True)
        self.held = wanted

    def release(self) -> None:
        """Let go of all patterns."""
        self.held = frozenset()
        for part in self._parts:
            part.windows = {}

    def replay(
        self,
        layers: Mapping[str, What],
        take: Callable[[ReplayedPart, range], None],
        *,
        steps: int,
        hold: bool = False,
        first: int = 0,
        at_point: Callable[[int], None] | None = None,
        watch: StateWatch | None = None,
    ) -> ReplaySink:
        """Run the training again, and show its patterns as it goes by them.

        Args:
            layers: the layers whose patterns are wanted, each with the rows that are needed of it.
            take: is called with a part and some of its steps, in their order, while their patterns are there.
            steps: how many steps are wanted; the training is ended behind them.
            hold: keep the patterns when `take` has seen them.
            first: the first step that is wanted. A training that cannot start anywhere still starts at its beginning.
            at_point: is called at each restart point of the training with the number of steps that `take` has seen.
            watch: looks at the state of a training that can start anywhere.
        """
        train = self.require_train()
        world = find_replaying_world(self.run)
        require_same_question(world, repr((self.digest, sorted(layers.items()), steps, hold, first, self.tries_rows)))
        windows = _Windows(self, layers, take, hold=hold, first=first)
        seconds = self.recorded_seconds
        title = f"replaying ({seconds:.0f} s when it was recorded)" if seconds >= 1 else "replaying"
        inference = torch.is_inference_mode_enabled()
        with bar(title, total=steps - first) as advance:

            def ask(what: Callable[[], None]) -> None:
                with torch.inference_mode(inference), torch.no_grad():  # as where the question was asked
                    call_without_autocast(["cpu", "cuda"], what)

            def add(step: int, calls: Sequence[ReplayedCall]) -> None:
                if step < first:
                    return
                ask(lambda: without_filling(lambda: windows.add(step, calls)))
                advance(1)

            def look(step: int) -> None:
                if at_point is not None and step > first:
                    ask(windows.flush)
                    ask(lambda: at_point(step))

            start, again = self._restarted(train, first, look, watch, world)
            rows = None if self.tries_rows else known_rows(self.description)
            sink = ReplaySink(
                self.run,
                layers,
                add,
                steps=steps,
                on_difference=self._on_difference,
                first=start,
                rows=rows,
                world=world,
            )
            self.replays += 1
            run_again(again, sink)
            windows.flush()
        if sink.difference is not None:
            self._report(sink)
        return sink

    def _restarted(
        self, train: Train, step: int, look: Callable[[int], None], watch: StateWatch | None, world: World
    ) -> tuple[int, Train]:
        """Return a step up to a given one that a training can start at, and the training from there on.

        Args:
            train: the training.
            step: the given step.
            look: is called at each restart point, when all steps before are there and proved.
            watch: looks at the state before each step.
            world: the processes that run it again together, each with restart points of its own.
        """
        if not isinstance(train, Restartable):
            return 0, train
        points = self.restart_points(world.rank)
        start, point = points.before(common_start(world, lambda step: points.before(step)[0], step))

        def keep(step: int, take: Callable[[], dict[str, Any]], settle: Callable[[], None]) -> None:
            if points.is_at(step) and step > start and self._on_difference == "stop":  # a state that drifts is no point
                settle()
                points.keep(step, take)
                look(step)
            if watch is not None:
                watch.before_step(step, take)

        def again(recording: Recording) -> nn.Module:
            begin = None if watch is None else watch.begin
            return train.run(recording, first=start, point=point, keep=keep, begin=begin)

        return start, again

    @property
    def is_restartable(self) -> bool:
        """Whether the training can start anywhere, so that patterns can be asked for in any order of steps."""
        return isinstance(self._train, Restartable)

    def restart_points(self, rank: int = 0) -> RestartPoints:
        """Return the restart points of the training, or of one of its processes."""
        train = self.require_train()
        assert isinstance(train, Restartable), "only such a training has restart points"
        return RestartPoints(self.run, train.every, rank=rank)

    @contextlib.contextmanager
    def paging(self, layers: Collection[str]) -> Iterator[None]:
        """Let patterns of some layers be taken in any order of steps meanwhile: each few steps are replayed for it."""
        self.release()
        self.paged = frozenset(layers)
        try:
            yield
        finally:
            self.paged = frozenset()
            self.release()

    def page_in(self, steps: range, part: ReplayedPart) -> None:
        """Replay the steps between the restart points around some steps of a part, and hold their patterns alone."""
        every = self.restart_points().every
        first = max(part.start, steps.start - steps.start % every)
        stop = min(part.stop, -(-steps.stop // every) * every)
        self.release()
        needed: dict[str, What] = dict.fromkeys(self.paged, "keys+values")
        self.replay(needed, lambda part, steps: None, steps=stop, hold=True, first=first)

    def walk_back(self, visit: VisitStep, *, steps: int) -> None:
        """Show each of so many steps, the last one first, with the training put back to just before it."""
        if self.description.processes > 1:
            raise QueryError(
                f"Unrolled effects differentiate a training in one process; {self.name} was recorded by "
                f'{self.description.processes}. Ask for effects without method="unrolled".'
            )
        train = self.require_train()
        if not isinstance(train, Restartable):
            raise QueryError(
                "Unrolled effects go backwards through the training, which a function cannot: give it in pieces, as a "
                "dualform.Restartable with loss=..., to record_training and dualform.open(path, train=...)."
            )
        if self._on_difference != "stop":
            raise QueryError(
                "Unrolled effects are exact, and need a replay that is the recorded training: open the run without "
                'on_difference="report".'
            )

        def replay(steps: range, watch: StateWatch) -> None:
            self.replay({}, lambda part, window: None, steps=steps.stop, first=steps.start, watch=watch)

        with _keeping_generators(), torch.inference_mode(False), bar("walking back", total=steps) as advance:

            def look(step: RetracedStep) -> None:
                visit(step)
                advance(1)

            every = self.restart_points().every
            walk_training_back(train, replay, look, steps=steps, every=every)

    @property
    def recorded_seconds(self) -> float:
        """How long the recorded training took; a replay takes about as long."""
        training = self.description.training
        return 0.0 if training is None else training.seconds

    def require_train(self) -> Train:
        """Return the training function: the given one, or the one that the run remembers, if it may be called."""
        if self._train is None:
            training = self.description.training
            if training is None or training.function is None:
                raise ReplayError(
                    f"{self.name} does not know its training, which brings its patterns back. Give the function: "
                    "dualform.open(path, train=train)."
                )
            remembered = RememberedFunction(
                self.name,
                training.function,
                "its training is run",
                "open it with trust=True (--trust)",
                "give the function yourself: dualform.open(path, train=train)",
            )
            self._train = remembered.load(trust=self._trust)
        return self._train

    def _report(self, sink: ReplaySink) -> None:
        """Warn of a replay that was not the recorded training, with the drift of each parameter."""
        drift = ", ".join(f"{name!r} {size:.1e}" for name, size in sorted(sink.drift.items(), key=lambda one: -one[1]))
        warn_user(
            f"{sink.difference} At most, relative to its size, it drifts by: {drift or 'nothing'}.", ReplayWarning
        )


class _Windows:
    """Puts the patterns of replayed steps together, so that several small steps are looked at at once."""

    def __init__(
        self,
        source: ReplayedPatterns,
        layers: Mapping[str, What],
        take: Callable[[ReplayedPart, range], None],
        *,
        hold: bool,
        first: int = 0,
    ) -> None:
        self._source = source
        self._take = take
        self._hold = hold
        self._start = first
        self._needed = layers
        self._parts = iter(source.parts())
        self._part: ReplayedPart | None = None
        self._first = 0  # the first step of the window
        self._next = 0  # the step behind its last
        self._bytes = 0
        self._most_bytes: int | None = None  # of a window; found at its first pattern
        self._layers = {layer: (source.row_dtype(layer, "keys"), source.row_dtype(layer, "values")) for layer in layers}
        self._calls: dict[str, list[ReplayedCall]] = {layer: [] for layer in layers}
        self._before: dict[str, int] = {}  # patterns of the part that earlier windows had
        self._buffers: dict[tuple[str, str], Tensor] = {}  # memory of the last window, by layer and rows

    def add(self, step: int, calls: Sequence[ReplayedCall]) -> None:
        """Take the patterns of a step."""
        while self._part is None or step >= self._part.stop:
            self._part = next(self._parts)
            self._first = self._next = max(self._part.start, self._start)
            self._before = {layer: self._part.rows_before(layer, self._first) for layer in self._layers}
        for call in calls:
            self._calls[call.layer].append(call)
            self._bytes += call.keys.nbytes + (0 if call.values is None else call.values.nbytes)
        if calls and self._most_bytes is None:
            self._most_bytes = _window_bytes(calls[0].keys.device)
        self._next = step + 1
        full = self._most_bytes is not None and self._bytes >= self._most_bytes
        if self._next == self._part.stop or (full and not self._hold):
            self.flush()

    def flush(self) -> None:
        """Show the patterns that came since the last time."""
        part, steps = self._part, range(self._first, self._next)
        if part is None or not steps:
            return
        for layer, (keys, values) in self._layers.items():
            calls = self._calls[layer]
            if calls:
                every = self._joined(layer, "keys", [call.keys for call in calls], keys)
                errors = [call.values for call in calls if call.values is not None]
                brought = self._joined(layer, "values", errors, values) if errors else None
                part.windows[layer] = (self._before[layer], every, brought)
                self._before[layer] += len(every)
            self._calls[layer] = []
        self._first, self._bytes = self._next, 0
        self._take(part, steps)
        if not self._hold:
            part.windows = {}

    def _joined(self, layer: str, what: str, rows: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the rows of several calls, one behind the other, as they would be stored.

        Keys alone, which only passes ask for, are put where those of the last window were in the CPU's memory, unless
        these are held: memory that is new to a process costs more than copying into it.
        """
        if all(one.is_cuda for one in rows) and not self._hold:
            return rows[0] if len(rows) == 1 else torch.cat(list(rows))  # widened where they are read, layer by layer
        lasting = self._hold or self._needed[layer] != "keys"
        if len(rows) == 1 or lasting or not all(one.is_cpu and one.dtype is dtype for one in rows):
            return (rows[0] if len(rows) == 1 else torch.cat(list(rows))).to(dtype)
        count, width = sum(map(len, rows)), rows[0].shape[1]
        buffer = self._buffers.get((layer, what))
        if buffer is None or len(buffer) < count:
            buffer = self._buffers[layer, what] = torch.empty(count, width, dtype=dtype, device="cpu")
        return torch.cat(list(rows), out=buffer[:count])


def known_rows(description: RunDescription) -> Mapping[str, RowCheck] | None:
    """Return what a replay need not try again of the layers' rows: which layers have none. None where it has to.

    The recording has tried the other layers too, and their rows were those of the batch, on its own axis.
    """
    plain = f"rows are axis {description.batch_axis} of "
    found = {}
    for name, entry in description.rows.items():
        if entry.outcome == "not aligned":
            found[name] = RowCheck("not aligned", entry.reason)
        elif entry.outcome != "proved" or not entry.reason.startswith(plain) or "flattened" in entry.reason:
            return None
    return found


def _window_bytes(device: torch.device) -> int:
    """Return the size of the patterns that are looked at together on a device."""
    if device.type != "cuda":
        return WINDOW_BYTES
    return max(WINDOW_BYTES, min(GPU_WINDOW_BYTES, torch.cuda.mem_get_info(device)[0] // 8))


def run_again(train: Train, sink: Sink) -> Any:
    """Call a training function with a recording that goes to a sink; return what it returns, None where it was ended.

    The training sees torch's modes as a program has them at first, whatever question it is run for, and the global
    generators of random numbers are afterwards what they were.
    """

    def make(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], **options: Any) -> Recorder:
        chosen = {name: value for name, value in options.items() if name in RECORDER_OPTIONS}
        if isinstance(sink, ReplaySink):
            chosen |= {"known": KnownSteps(sink.known_factors, sink.rows, sink.processes), "needed": sink.needed}
        return Recorder(model, optimizer, sink, check="never", **chosen)

    opened = OneRecording(make)
    result = None
    with _keeping_generators(), torch.inference_mode(False), contextlib.suppress(ReplayEnded):
        result = _call_with_gradients(train, opened)
        opened.require_used(train)
    if isinstance(sink, ReplaySink):
        sink.finish()
    return result


def run_again_unrecorded(train: Train, recording: Recording) -> Any:
    """Call a training function as `run_again` does, with a recording that records nothing; return what it returns."""
    with _keeping_generators(), torch.inference_mode(False):
        return _call_with_gradients(train, recording)


@with_gradients
def _call_with_gradients(train: Train, opened: Recording) -> Any:
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return call_without_autocast(kinds, lambda: train(opened))


@contextlib.contextmanager
def _keeping_generators() -> Iterator[None]:
    """Put the global generators of torch, numpy and Python back to where they were."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
