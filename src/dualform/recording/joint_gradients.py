"""The history of a gradient that several processes make together: by which factor each backward reaches the step.

In each process a backward adds its own patterns to its own gradient, of which a sample is taken. At some time the
gradients of all processes are reduced to one. So a gradient at the step, or before a later backward of the same step,
is a factor times the *sum over the processes* of the samples taken after the backward before; that factor is measured
here. It is 1/W where W processes average, and includes clipping and other scaling.

A gradient that is reduced after every backward of an accumulation is the same in all processes from then on, so that
the sum over processes counts it W times.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dualform.errors import RefusedError
from dualform.recording.agreement import gather_numbers, sum_numbers
from dualform.recording.divided_gradients import (
    ReducedRows,
    RowHistory,
    RowSeries,
    RowSums,
    common_factors,
    follow_rows,
)
from dualform.recording.gradient_history import NOT_CLEARED, NOT_FINITE, SAMPLE_ROUNDING, Accumulation, Factors, Seen
from dualform.recording.gradient_samples import GradientSample
from dualform.recording.joint_uneven import refuse_stale_state
from dualform.recording.probes import COARSE_ROUNDING, Float64Array, length
from dualform.recording.world import World

SNAP_ROUNDING = 8
"""Units of rounding within which a measured factor is taken for 1/W, or for 1."""
NOT_REDUCED = (
    "its gradient at the step is not one factor times the sum of the gradients of all {size} processes (residual "
    "{residual:.1e}): it is not reduced over these processes, or a communication hook changes it, or it was changed "
    "by something other than one factor (clipping by value, noise, an edit by hand)"
)


@dataclass(frozen=True, slots=True)
class JointHistories:
    """The gradients of a step in all processes together.

    Attributes:
        follow: returns what happened to each gradient, the same in every process.
        micros: the largest number of backwards that a process had.
        finals: the samples at the step of gradients that are divided by rows, with the rows of all processes.
    """

    follow: Callable[[], list[Factors]]
    micros: int
    finals: Mapping[str, GradientSample | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _OwnHistory:
    """A gradient's history in this process, from the last time that it was cleared.

    Attributes:
        cleared: the backwards whose gradients were cleared.
        events: the accumulations since.
        final: the sample at the step.
        count: the number of elements of a sample.
        place: where this process's rows lie among them, of a gradient that is divided by rows.
    """

    cleared: frozenset[int]
    events: Sequence[Accumulation]
    final: GradientSample | None
    count: int
    place: slice | None = None

    @property
    def changed(self) -> bool:
        """Whether the gradient changed between two backwards."""
        pairs = zip(self.events, self.events[1:], strict=False)
        return any(later.reduced is not None or not _is_same(one.after, later.before) for one, later in pairs)


def join_histories(
    look: Callable[[], Mapping[str, Seen]],
    counts: Mapping[str, int],
    world: World,
    step: int,
    *,
    micros: int,
    skipped: bool,
    coarse: bool,
    places: Mapping[str, slice],
    state_mark: Callable[[], float] = lambda: 0.0,
) -> JointHistories:
    """Exchange what samples show of the gradients of a step, from the backwards of all processes to the step.

    Every process calls this, with the same parameters.

    Args:
        look: returns each parameter's history and its sample at the step, in the CPU's memory; may raise.
        counts: the number of elements of each parameter's sample.
        world: the processes.
        step: the number of the step.
        micros: the number of backwards of this process.
        skipped: whether a gradient scaler makes the step skip.
        coarse: whether the gradients may be rounded coarsely where they are reduced.
        places: where this process's rows lie in the samples of gradients that are divided by rows.
        state_mark: returns a number of the optimizers' state that has to be the same in all processes.
    """
    seen: dict[str, Seen] = {}
    own: dict[str, _OwnHistory] = {}

    def tell() -> list[float]:
        seen.update(look())
        for name, (history, final) in seen.items():
            own[name] = _own_history(history.accumulations, final, counts[name], name, places.get(name))
        events = max((len(one.events) for one in own.values()), default=0)
        layout = zlib.crc32(repr([*counts.items(), step]).encode())
        return [micros, events, any(one.changed for one in own.values()), skipped, layout, state_mark(), 1.0]

    told = gather_numbers(world, 7, tell)
    told = told[told[:, 6] > 0]  # without processes that have no batches left, which add zeros
    active = len(told)
    if len(set(told[:, 5].tolist())) > 1:
        raise refuse_stale_state()
    if len(set(told[:, 4].tolist())) > 1:
        raise RefusedError(
            "The processes of this training do not take the same step: their optimizers hold different parameters, or "
            "some have recorded more steps than others. Give all of them the same model and optimizer, and step as "
            "often in each."
        )
    most_micros, most_events = int(told[:, 0].max()), int(told[:, 1].max())
    if told[:, 3].any():
        if not told[:, 3].all():
            raise RefusedError("Some of the processes skip this step and some do not; they have to agree.")
        return JointHistories(lambda: [Factors({}) for _ in seen], most_micros)
    moments = max(1, most_events) if told[:, 2].any() else 1
    sums = _Sums(list(counts.values()), most_micros, moments)
    rows = RowSums({name: counts[name] for name in places}, moments)

    def pack() -> Float64Array:
        divided = {name: RowHistory(one.events, one.final, one.place) for name, one in own.items() if one.place}
        return np.concatenate([sums.pack(list(own.values())), rows.pack(divided)])

    total = sum_numbers(world, sums.size + rows.size, pack)
    total, joined_rows = total[: sums.size], total[sums.size :]
    joined = {name: rows.joined(joined_rows, name, own[name].final) for name in places}

    def follow() -> list[Factors]:
        plain = (1.0 / active, 1.0 / world.size, 1.0)
        return _follow_all(seen, own, sums, total, joined, active, plain, coarse)

    return JointHistories(follow, most_micros, {name: one.final for name, one in joined.items()})


def _own_history(
    accumulations: Sequence[Accumulation],
    final: GradientSample | None,
    count: int,
    name: str,
    place: slice | None,
) -> _OwnHistory:
    """Return a gradient's history from the last time that it was cleared; refuse one that was never cleared."""
    cleared: set[int] = set()
    events: list[Accumulation] = []
    for event in accumulations:
        before = event.before
        if place is not None:
            before = event.reduced if before is None else before
        # Between two backwards the rows of one process may be zero where those of another are not.
        if before is None or (before.zero and (place is None or not events)):
            if events and (before is None or not events[-1].after.zero):
                cleared |= {one.micro for one in events}
                events = []
        elif not events:
            raise RefusedError(f"Parameter {name!r} cannot be recorded exactly: {NOT_CLEARED}.")
        events.append(event)
    if final is None:
        cleared |= {one.micro for one in events}
        events = []
    return _OwnHistory(frozenset(cleared), events, final, count, place)


class _Sums:
    """The numbers of which processes exchange sums: samples, their lengths, and which backwards reached a gradient."""

    def __init__(self, counts: Sequence[int], micros: int, moments: int) -> None:
        """Lay out the numbers.

        Args:
            counts: the number of elements of each gradient's sample.
            micros: the largest number of backwards of a process.
            moments: of how many backwards the samples are exchanged; 1 for those of each gradient's last one.
        """
        self.moments = moments
        self._micros = micros
        self._counts = counts
        self._widths = [moments * (count + 2) + 2 * micros for count in counts]
        self._begins = np.cumsum([0, *self._widths])
        self.size = int(self._begins[-1])

    def pack(self, own: Sequence[_OwnHistory]) -> Float64Array:
        """Return this process's numbers."""
        found = np.zeros(self.size)
        for place, one in enumerate(own):
            samples, lengths, unchanged, reached, cleared = self.of(found, place)
            chosen = one.events[-1:] if self.moments == 1 else one.events
            for moment, event in enumerate(chosen):
                samples[moment] = event.after.array
                lengths[moment] = length(event.after.array)
                later = one.events[moment + 1 : moment + 2] if self.moments > 1 else []
                unchanged[moment] = bool(later) and _is_same(event.after, later[0].before)
            reached[[event.micro for event in one.events]] = 1
            cleared[list(one.cleared)] = 1
        return found

    def of(
        self, numbers: Float64Array, place: int
    ) -> tuple[Float64Array, Float64Array, Float64Array, Float64Array, Float64Array]:
        """Return views of one gradient's numbers.

        They are its samples (moments, n) and their lengths (moments,), whether it was the same before the next backward
        (moments,), which backwards reached it (micros,), and which were cleared (micros,).
        """
        mine = numbers[self._begins[place] : self._begins[place + 1]]
        moments, count = self.moments, self._counts[place]
        ends = np.cumsum([moments * count, moments, moments, self._micros, self._micros])
        samples, lengths, unchanged, reached, cleared = np.split(mine, ends[:-1])
        return samples.reshape(moments, count), lengths, unchanged, reached, cleared


def _follow_all(
    seen: Mapping[str, Seen],
    own: Mapping[str, _OwnHistory],
    sums: _Sums,
    total: Float64Array,
    joined: Mapping[str, ReducedRows],
    size: int,
    plain: Sequence[float],
    coarse: bool,
) -> list[Factors]:
    """Return what happened to each gradient, from the sums over the `size` processes that take the step."""
    common = _common_factor(list(own.values()), sums, total, plain)
    series: dict[str, RowSeries] = {}
    for place, (name, (history, _)) in enumerate(seen.items()):
        if name in joined:
            samples, lengths, unchanged, reached, _ = sums.of(total, place)
            micros = np.flatnonzero(reached).tolist()
            series[name] = RowSeries(micros, samples, lengths, unchanged, joined[name], history.width)
    by_rows = common_factors(list(series.values()), size)
    found = []
    for place, ((name, (history, _)), one) in enumerate(zip(seen.items(), own.values(), strict=True)):
        samples, lengths, unchanged, reached, cleared = sums.of(total, place)
        if (both := np.flatnonzero((reached > 0) & (cleared > 0))).size:
            text = f"some processes cleared the gradient of backward {both[0]} before the step, and others did not"
            found.append(Factors({}, text))
            continue
        micros = np.flatnonzero(reached).tolist()
        factors = dict.fromkeys(np.flatnonzero(cleared).tolist(), 0.0)
        if name in series and (sums.moments == 1 or np.isin(reached, (0, size)).all()):
            followed = follow_rows(series[name], size, by_rows, coarse=coarse)
            found.append(Factors({**factors, **followed.of}, followed.objection))
            continue
        following = _JointFollowing(history.width, size, common, coarse)
        if sums.moments == 1:
            following.factors = dict.fromkeys(micros, 1.0)
        else:
            if not np.isin(reached, (0, size)).all() or len(one.events) != len(micros):
                text = (
                    "gradients were reduced between the backwards of this step, some of which reached it in some "
                    "processes only. Accumulate under DistributedDataParallel.no_sync()"
                )
                found.append(Factors({}, text))
                continue
            for moment, micro in enumerate(micros):
                if moment and unchanged[moment - 1] < size:
                    following.reduce(samples[moment - 1], lengths[moment - 1], one.events[moment].before)
                following.factors[micro] = 1.0
        if micros:
            last = len(micros) - 1 if sums.moments > 1 else 0
            following.reduce(samples[last], lengths[last], one.final)
        elif one.final is not None and not one.final.zero:
            following.objection = NOT_CLEARED
        found.append(Factors({**factors, **following.factors}, following.objection))
    return found


def _common_factor(own: Sequence[_OwnHistory], sums: _Sums, total: Float64Array, plain: Sequence[float]) -> float:
    """Return the factor of all gradients together between their last backwards and the step; a plain one if it is."""
    above = below = 0.0
    eps = 0.0
    for place, one in enumerate(own):
        if one.place is not None:
            continue
        samples, _, _, reached, _ = sums.of(total, place)
        last = int(np.count_nonzero(reached)) - 1 if sums.moments > 1 else 0
        if one.final is None or last < 0 or last >= len(samples):
            continue
        now = one.final.array
        if np.isfinite(now).all() and np.isfinite(samples[last]).all():
            above += float(samples[last] @ now)
            below += float(samples[last] @ samples[last])
            eps = max(eps, torch.finfo(one.final.elements.dtype).eps)
    factor = above / below if below else plain[0]
    for candidate in plain:
        if abs(factor - candidate) <= SNAP_ROUNDING * eps * candidate:
            return candidate
    return factor


@dataclass(slots=True)
class _JointFollowing:
    """One gradient on its way through a step.

    Attributes:
        width: d_in; 1 for a bias.
        size: the number of processes.
        common: the factor of all gradients of the step together, which is tried first.
        coarse: whether the gradient may be rounded coarsely where it is reduced.
        factors: backward -> its factor so far.
        objection: what the identity does not cover, in words.
        shared: the backwards whose gradients are the same in all processes by now.
    """

    width: int
    size: int
    common: float
    coarse: bool
    factors: dict[int, float] = field(default_factory=dict)
    objection: str | None = None
    shared: frozenset[int] = frozenset()

    def reduce(self, before: Float64Array, lengths: float, sample: GradientSample | None) -> None:
        """Apply to all factors so far what happened between a sum over processes and a later sample of the gradient."""
        now = np.zeros_like(before) if sample is None else sample.array
        if not (np.isfinite(now).all() and np.isfinite(before).all()):
            self.objection = self.objection or NOT_FINITE
            return
        factor = self.common
        if not self._fits(before, lengths, sample, now, factor):
            power = float(before @ before)
            factor = float(before @ now) / power if power else math.nan
            if not self._fits(before, lengths, sample, now, factor):
                difference, size = length(now - factor * before), length(now)
                residual = difference / size if size else math.nan
                self.objection = self.objection or NOT_REDUCED.format(size=self.size, residual=residual)
                factor = math.nan
        self.factors = {
            micro: one * factor * (self.size if micro in self.shared else 1) for micro, one in self.factors.items()
        }
        self.shared = frozenset(self.factors)

    def _fits(
        self, before: Float64Array, lengths: float, sample: GradientSample | None, now: Float64Array, factor: float
    ) -> bool:
        """Say whether a factor explains a sample up to rounding."""
        if sample is None or not math.isfinite(factor):
            return not now.any() and not before.any()
        limits = torch.finfo(sample.elements.dtype)
        eps = COARSE_ROUNDING if self.coarse else limits.eps
        units = SAMPLE_ROUNDING + self.size + (2 * math.sqrt(self.width) if sample.projected else 0)
        difference = length(now - factor * before)
        size = max(abs(factor) * lengths, sample.size)
        if difference <= units * eps * size + limits.smallest_normal / limits.eps:
            return True
        size = max(size, sample.true_size)
        return difference <= units * eps * size + limits.smallest_normal / limits.eps


def _is_same(before: GradientSample, after: GradientSample | None) -> bool:
    return after is not None and np.array_equal(before.array, after.array)
