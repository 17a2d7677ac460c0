"""The executor of a run whose patterns come back with a replay: all jobs of a question in one run of the training.

Patterns that are few are held in memory after a replay, and asked there by the executor for stored patterns, like all
that is stored. Otherwise each pass and fold takes its patterns while the training goes by them, and nothing is held.
"""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dualform.engine.consent import asks_before_replays
from dualform.engine.fold import RunningFolds
from dualform.engine.jobs import Executor, Fold, Job, Pass, Sweep
from dualform.engine.joint_rounds import joint_rounds
from dualform.engine.local import LocalExecutor, block_patterns
from dualform.engine.plain import RunningPass
from dualform.engine.racing import RacingBest
from dualform.engine.reading import PatternRange, kept_by_part
from dualform.engine.reducers import FLOAT32_SUM_KEYS, Best
from dualform.engine.source import PatternPart, PatternSource
from dualform.engine.sweep import ForwardSweep, run_sweep
from dualform.errors import DualformError, ReplayError, ReplayNeededError
from dualform.recording.estimate import size_text
from dualform.recording.watch import What
from dualform.replaying.job_names import name_job, pack_answer, unpack_answer
from dualform.replaying.joined_best import JoinedBest
from dualform.replaying.joint_replay import UnsureRowsError
from dualform.replaying.replayed_patterns import ReplayedPart, ReplayedPatterns
from dualform.replaying.unfinished_passes import UnfinishedPasses

SWEPT_BYTES = 4 << 30
"""Size of the parts of all steps' maps that may be kept between the two replays of contributions of single patterns."""

MAX_BLOCK_KEYS_GPU = 1 << 26
"""Elements of the keys that a pass without queries takes at once on a GPU."""


class ReplayExecutor:
    """Runs jobs over a run whose training can be run again.

    Args:
        stored: runs the jobs for which no replay is needed; by default threads on this machine, or its GPU.
    """

    def __init__(self, stored: Executor | None = None) -> None:
        self._stored: Executor = LocalExecutor() if stored is None else stored
        self._lock = threading.RLock()  # one question at a time: a replay sets torch's generators, and patterns go

    def run(self, source: PatternSource, jobs: Sequence[Job]) -> list[Any]:
        """Return the result of each job; those that need a replay share one, and are kept beside the run."""
        if not isinstance(source, ReplayedPatterns):
            return self._stored.run(source, jobs)
        rounds = joint_rounds()
        if rounds is not None:
            return rounds.run(lambda together: self._answer(source, together), jobs)
        return self._answer(source, jobs)

    def _answer(self, source: ReplayedPatterns, jobs: Sequence[Job]) -> list[Any]:
        """Return the result of each job, from the run's cache where it is kept there."""
        cache = source.answers
        names = [None if _unstored_layers(source, job) <= source.held else name_job(job) for job in jobs]
        kept = {name: found for name in names if name is not None and (found := cache.find(("replayed", name)))}
        needed = [job for job, name in zip(jobs, names, strict=True) if name not in kept]
        try:
            results = iter(self._run(source, needed))
        except UnsureRowsError:
            source.tries_rows = True
            results = iter(self._run(source, needed))
        answers = []
        for job, name in zip(jobs, names, strict=True):
            if name in kept:
                assert isinstance(job, Pass), "only passes have names"
                answers.append(unpack_answer(kept[name], job.like.device))
                continue
            answers.append(next(results))
            if name is not None and (packed := pack_answer(answers[-1])) is not None:
                cache.keep(("replayed", name), packed)
        return answers

    def _run(self, source: ReplayedPatterns, jobs: Sequence[Job]) -> list[Any]:
        """Return the result of each job, by one replay at most where none goes backwards."""
        _ask_first(source, jobs)
        with self._lock:
            _ask_first(source, jobs)  # what is held may have changed meanwhile
            return self._run_alone(source, jobs)

    def _run_alone(self, source: ReplayedPatterns, jobs: Sequence[Job]) -> list[Any]:
        """Return the result of each job while no other thread asks."""
        needed = [_unstored_layers(source, job) for job in jobs]
        every = frozenset[str]().union(*needed)
        if not every <= source.held:
            unstored = frozenset(name for name in source.layers if not source.is_stored(name) and source.count(name))
            # All layers where they fit: the next question may be about others.
            if fitting := next((some for some in (unstored, every | source.held) if source.can_hold(some)), None):
                source.hold(fitting)
        at_hand = [job for job, layers in zip(jobs, needed, strict=True) if layers <= source.held]
        going_by = [job for job, layers in zip(jobs, needed, strict=True) if not layers <= source.held]
        forward = [job for job in going_by if not isinstance(job, Sweep)]
        backward = [job for job in going_by if isinstance(job, Sweep)]
        found = iter(self._stored.run(source, at_hand) if at_hand else [])
        passed = iter(_run_forward(source, forward) if forward else [])
        swept = iter(_run_backward(source, backward) if backward else [])
        return [
            next(found if layers <= source.held else swept if isinstance(job, Sweep) else passed)
            for job, layers in zip(jobs, needed, strict=True)
        ]


def _ask_first(source: ReplayedPatterns, jobs: Sequence[Job]) -> None:
    """Refuse jobs that need a replay, where replays are asked for first and the training may be called at all."""
    if not asks_before_replays() or all(_unstored_layers(source, job) <= source.held for job in jobs):
        return
    try:
        source.require_train()
    except DualformError as error:
        raise ReplayError(f"The run keeps the steps of its training and no patterns. {error}") from error
    seconds = source.recorded_seconds
    raise ReplayNeededError(
        f"The run keeps the steps of its training and no patterns: the training has to be run again for this, which "
        f"takes about {max(seconds, 1):.0f} s.",
        seconds,
    )


def _unstored_layers(source: ReplayedPatterns, job: Job) -> frozenset[str]:
    """Return the layers whose patterns a job needs and the run does not store."""
    if isinstance(job, Fold):
        names = set(job.parameters)
    else:
        names = set(source.layer(job.layer).parameters.values()) if isinstance(job, Sweep) else set()
    mine = {name for name, entry in source.layers.items() if names & set(entry.parameters.values())}
    mine |= set() if isinstance(job, Fold) else {job.layer}
    return frozenset(name for name in mine if not source.is_stored(name) and source.count(name))


def _run_backward(source: ReplayedPatterns, jobs: Sequence[Sweep[Any]]) -> list[Any]:
    """Run sweeps of all layers: by two replays, or page by page where too much would be kept between the two."""
    sweeps = [ForwardSweep(source, job) for job in jobs]
    large = [sweep.kept_bytes > SWEPT_BYTES for sweep in sweeps]
    for job, sweep, is_large in zip(jobs, sweeps, large, strict=True):
        if is_large and not source.is_restartable:
            raise ReplayError(
                f"Contributions of single patterns of layer {job.layer!r} go backwards through the steps, under an "
                f"optimizer without coefficients. Its {source.steps} steps' maps take {size_text(sweep.kept_bytes)} in "
                f"the output units that are asked about, more than the {size_text(SWEPT_BYTES)} that are kept for it. "
                "Ask about fewer units or queries at once; store the layer's patterns: "
                "dualform.replay(train, path, keep=Patterns(layers=[...])); or give the training as a "
                "dualform.Restartable, which can start anywhere."
            )
    paged = iter([_sweep_paged(source, job) for job, is_large in zip(jobs, large, strict=True) if is_large])
    small = [place for place, is_large in enumerate(large) if not is_large]
    kept = iter(_sweep_in_sets(source, [jobs[place] for place in small], [sweeps[place] for place in small]))
    return [next(paged if is_large else kept) for is_large in large]


def _sweep_paged(source: ReplayedPatterns, job: Sweep[Any]) -> Any:
    """Run a sweep over a training that can start anywhere: patterns are replayed from point to point."""
    with source.paging(_unstored_layers(source, job)):
        return run_sweep(source, job)


def _sweep_in_sets(source: ReplayedPatterns, jobs: Sequence[Sweep[Any]], sweeps: Sequence[ForwardSweep]) -> list[Any]:
    """Run sweeps by two replays for each set of them whose parts of the steps' maps may be kept."""
    results: list[Any] = []
    together: list[ForwardSweep] = []
    for place, sweep in enumerate(sweeps):
        together.append(sweep)
        follows = sweeps[place + 1].kept_bytes if place + 1 < len(sweeps) else SWEPT_BYTES + 1
        if sum(one.kept_bytes for one in together) + follows > SWEPT_BYTES:
            results += _sweep_forward(source, jobs[len(results) : place + 1], together)
            together = []
    return results


def _sweep_forward(source: ReplayedPatterns, jobs: Sequence[Sweep[Any]], sweeps: Sequence[ForwardSweep]) -> list[Any]:
    """Run sweeps by two replays."""
    folds = [sweep.folds() for sweep in sweeps]
    kept = iter(_run_forward(source, [fold for some in folds for fold in some]))
    for sweep, some in zip(sweeps, folds, strict=True):
        sweep.begin([next(kept) for _ in some])
    layers: dict[str, What] = {job.layer: "keys+values" for job in jobs if not source.is_stored(job.layer)}

    def take(part: ReplayedPart, window: range) -> None:
        for step in window:
            for sweep in sweeps:
                sweep.take(step)

    source.replay(layers, take, steps=min(source.steps, max(job.view.horizon for job in jobs)))
    return [sweep.result() for sweep in sweeps]


def _run_forward(source: ReplayedPatterns, jobs: Sequence[Job]) -> list[Any]:
    """Run passes and folds while the training goes by their patterns."""
    folds = [job for job in jobs if isinstance(job, Fold)]
    folding = RunningFolds(source, folds) if folds else None
    passing = _passes(source, [job for job in jobs if isinstance(job, Pass)])
    layers: dict[str, What] = {}
    for job in jobs:
        values = isinstance(job, Fold) or job.needs_values
        for name in _unstored_layers(source, job):
            layers[name] = "keys+values" if values else layers.get(name, "keys")
    steps = max([0 if folding is None else folding.steps, *(one.steps for one in passing)])

    races = dict.fromkeys(one.race for one in passing if isinstance(one, _JoinedPass))

    def take(part: ReplayedPart, window: range) -> None:
        for one in passing:
            one.take(part, window)
        for race in races:
            race.settle_if_many()
        if folding is not None:
            for step in window:
                if step < folding.steps:
                    folding.take(step)

    unfinished = UnfinishedPasses(source, [] if folds else [job for job in jobs if isinstance(job, Pass)])
    first = 0
    if (found := unfinished.find()) is not None:
        first, states = found
        for one, state in zip(passing, states, strict=True):
            one.go_on(state)
    source.replay(
        layers,
        take,
        steps=steps,
        first=first,
        at_point=lambda step: unfinished.keep(step, [one.state() for one in passing]),
    )
    passed, folded = iter(passing), iter([] if folding is None else folding.results())
    return [next(folded) if isinstance(job, Fold) else next(passed).result() for job in jobs]


class _PassingBy:
    """A pass that takes its patterns window by window."""

    def __init__(self, source: ReplayedPatterns, job: Pass[Any]) -> None:
        self.steps = min(job.view.horizon, source.steps)
        self._job = job
        self._running = RunningPass(source, job)
        self._size = job.block_patterns or _block_patterns(source, job)
        self._kept: Iterator[tuple[PatternPart, npt.NDArray[np.int64], int, int]] = kept_by_part(
            source, job.layer, horizon=job.view.horizon, mask=job.view.mask
        )
        self._part: tuple[PatternPart, npt.NDArray[np.int64], int, int] | None = None

    def take(self, part: ReplayedPart, window: range) -> None:
        """Take the kept patterns of the steps that are here."""
        if window.start >= self.steps:
            return
        while self._part is None or self._part[0].index < part.index:
            self._part = next(self._kept)
        _, rows, before, kept_before = self._part
        if self._job.layer not in part.windows:
            return
        first, keys, _ = part.windows[self._job.layer]
        start, stop = np.searchsorted(rows, [first, first + len(keys)]).tolist()
        for at in range(start, stop, self._size):
            mine = rows[at : min(stop, at + self._size)]
            self._take_range(PatternRange(part, mine, kept_before + at, before))

    def _take_range(self, wanted: PatternRange) -> None:
        """Take a range of patterns that are here."""
        self._running.take(wanted)

    def state(self) -> Any:
        """Return the state of all patterns so far; None where it cannot be gone on with."""
        return self._running.state()

    def go_on(self, state: Any) -> None:
        """Begin with the state of earlier patterns."""
        self._running.go_on(state)

    def result(self) -> Any:
        """Return the answer."""
        return self._running.result()


class _RacingPass(_PassingBy):
    """A pass for the best patterns on a CPU: only measures that beat the worst of them are looked at."""

    def __init__(self, source: ReplayedPatterns, job: Pass[Any]) -> None:
        super().__init__(source, job)
        self._race = RacingBest(job.reducer, job.new_state())  # type: ignore[arg-type]

    def _take_range(self, wanted: PatternRange) -> None:
        self._race.take(self._race.prepare(*self._running.measure(wanted)))

    def state(self) -> Any:
        """Return the state of all patterns so far."""
        return self._race.state()

    def go_on(self, state: Any) -> None:
        """Begin with the state of earlier patterns."""
        self._race = RacingBest(self._job.reducer, state)  # type: ignore[arg-type]

    def result(self) -> Any:
        """Return the answer."""
        return self._race.result()


class _JoinedPass(_PassingBy):
    """A pass for the best patterns on a GPU: those of several passes are found together.

    Attributes:
        race: finds the best of all of them.
    """

    def __init__(self, source: ReplayedPatterns, job: Pass[Any], race: JoinedBest, place: int) -> None:
        super().__init__(source, job)
        self.race = race
        self._place = place

    def _take_range(self, wanted: PatternRange) -> None:
        block, measures, _ = self._running.measure(wanted)
        self.race.add(self._place, block, measures)

    def state(self) -> None:
        """Return nothing: the race of all passes is not kept."""

    def result(self) -> Any:
        """Return the answer."""
        return self.race.result(self._place)


def _block_patterns(source: ReplayedPatterns, job: Pass[Any]) -> int:
    """Return how many patterns a pass takes at once: on a GPU as many as may be, since every block starts kernels."""
    if job.queries is not None or job.like.device.type == "cpu":
        return block_patterns(job)
    return max(
        FLOAT32_SUM_KEYS, MAX_BLOCK_KEYS_GPU // source.layer(job.layer).d_in // FLOAT32_SUM_KEYS * FLOAT32_SUM_KEYS
    )


def _passes(source: ReplayedPatterns, jobs: Sequence[Pass[Any]]) -> list[_PassingBy]:
    """Return passes at work; those for the best patterns on a GPU together, where they ask for as many."""
    together: dict[tuple[Any, ...], list[int]] = {}
    for place, job in enumerate(jobs):
        if _asks_for_best(job) and job.like.device.type != "cpu":
            assert job.queries is not None, "the best are the best for a query"
            together.setdefault((job.reducer, len(job.queries), job.like.dtype, job.like.device), []).append(place)
    joined: dict[int, _JoinedPass] = {}
    for places in together.values():
        first = jobs[places[0]]
        assert first.queries is not None
        race = JoinedBest(first.reducer, len(places), len(first.queries), first.like)  # type: ignore[arg-type]
        joined |= {place: _JoinedPass(source, jobs[place], race, at) for at, place in enumerate(places)}
    return [
        joined[place] if place in joined else (_RacingPass if _asks_for_best(job) else _PassingBy)(source, job)
        for place, job in enumerate(jobs)
    ]


def _asks_for_best(job: Pass[Any]) -> bool:
    """Say whether a pass is one for the best of all patterns, not by group, of one row of measures for each query."""
    plain = isinstance(job.reducer, Best) and job.reducer.groups == 1 and job.groups is None
    return plain and job.queries is not None and job.rows is None and job.like.is_floating_point()
