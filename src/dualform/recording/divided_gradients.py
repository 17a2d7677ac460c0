"""The history of a gradient that several processes make together and divide by rows: the factor of each backward.

In each process a backward adds to a gradient with all rows. When it is reduced, f times the sum over the processes is
added to what was reduced before, of which each process has its rows, and the process's own gradient is gone. Later
everything that was reduced may be multiplied by one factor (clipping). So between two moments

    reduced now  =  a · (reduced before)  +  f · (sum over the processes of their own gradients)

in which a and f are measured, from samples whose rows the processes have put together.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dualform.recording.gradient_history import NOT_FINITE, SAMPLE_ROUNDING, Accumulation, Factors
from dualform.recording.gradient_samples import GradientSample
from dualform.recording.probes import COARSE_ROUNDING, Float64Array, length

NOT_REDUCED_BY_ROWS = (
    "its gradient at the step is not made of the gradients of all {size} processes by one factor (residual "
    "{residual:.1e}): it is not reduced over these processes, or a hook changes it, or it was changed by something "
    "other than one factor (clipping by value, noise, an edit by hand)"
)
HALF_REDUCED = "some processes reduced its gradient between two backwards of this step, and others did not"


@dataclass(frozen=True, slots=True)
class RowHistory:
    """A divided gradient's history in this process.

    Attributes:
        events: the accumulations since the gradient was last cleared.
        final: the sample of this process's rows at the step.
        place: where these rows lie among the elements of a sample with all rows.
    """

    events: Sequence[Accumulation]
    final: GradientSample | None
    place: slice


@dataclass(frozen=True, slots=True)
class ReducedRows:
    """A divided gradient as all processes together have it.

    Attributes:
        before: the samples of what was reduced before each backward, (moments, n).
        gone: of how many processes the own gradient was gone before each backward, (moments,).
        final: the sample of the gradient at the step; None where there is none.
    """

    before: Float64Array
    gone: Float64Array
    final: GradientSample | None


class RowSums:
    """The numbers of divided gradients of which processes exchange sums, to put the rows of all together."""

    def __init__(self, counts: Mapping[str, int], moments: int) -> None:
        """Lay out the numbers.

        Args:
            counts: divided parameter -> the number of elements of a sample with all rows.
            moments: of how many backwards the samples are exchanged.
        """
        self._counts = counts
        self._moments = moments
        widths = [moments * (count + 1) + count + 2 for count in counts.values()]
        self._ends = dict(zip(counts, np.cumsum(widths).tolist(), strict=True))
        self.size = sum(widths)

    def pack(self, own: Mapping[str, RowHistory]) -> Float64Array:
        """Return this process's numbers."""
        found = np.zeros(self.size)
        for name, one in own.items():
            before, gone, final, marks = self._of(found, name)
            for moment, event in enumerate(one.events[-1:] if self._moments == 1 else one.events):
                if event.reduced is not None:
                    before[moment, one.place] = event.reduced.array
                gone[moment] = event.before is None
            if one.final is not None:
                final[one.place] = one.final.array
                marks[:] = one.final.true_size**2, 1
        return found

    def joined(self, total: Float64Array, name: str, like: GradientSample | None) -> ReducedRows:
        """Return a gradient as the sums over all processes show it.

        Args:
            total: the sums.
            name: the parameter.
            like: this process's own sample at the step.
        """
        before, gone, final, marks = self._of(total, name)
        if like is None or not marks[1]:
            return ReducedRows(before, gone, None)
        dtype = like.elements.dtype
        norm = torch.tensor(math.sqrt(marks[0]), dtype=torch.float64)
        return ReducedRows(before, gone, GradientSample(torch.from_numpy(final).to(dtype), like.projected, norm))

    def _of(self, numbers: Float64Array, name: str) -> tuple[Float64Array, Float64Array, Float64Array, Float64Array]:
        count, moments, end = self._counts[name], self._moments, self._ends[name]
        mine = numbers[end - (moments * (count + 1) + count + 2) : end]
        ends = np.cumsum([moments * count, moments, count])
        before, gone, final, marks = np.split(mine, ends)
        return before.reshape(moments, count), gone, final, marks


@dataclass(frozen=True, slots=True)
class RowSeries:
    """What processes exchanged of a divided gradient.

    Attributes:
        micros: the backwards that reached it.
        samples: the sums of the own gradients after each backward, (moments, n).
        lengths: the sums of their norms, (moments,).
        unchanged: of how many processes the own gradient was the same before the next backward, (moments,).
        rows: what was reduced.
        width: d_in; 1 for a bias.
    """

    micros: Sequence[int]
    samples: Float64Array
    lengths: Float64Array
    unchanged: Float64Array
    rows: ReducedRows
    width: int


def common_factors(series: Sequence[RowSeries], size: int) -> tuple[float, float]:
    """Return the factors a and f of all divided gradients together, between their last backwards and the step."""
    matrix, vector, eps = np.zeros((2, 2)), np.zeros(2), 0.0
    for one in series:
        final, last = one.rows.final, _last(one)
        if final is None or last < 0 or last >= len(one.samples):
            continue
        before, summed, now = one.rows.before[last], one.samples[last], final.array
        if all(np.isfinite(array).all() for array in (before, summed, now)):
            both = np.stack([before, summed])
            matrix += both @ both.T
            vector += both @ now
            eps = max(eps, torch.finfo(final.elements.dtype).eps)
    if not matrix[0, 0]:  # nothing was reduced before: f alone is measured
        kept, factor = 1.0, vector[1] / matrix[1, 1] if matrix[1, 1] else 1.0 / size
    else:
        kept, factor = np.linalg.lstsq(matrix, vector, rcond=None)[0].tolist()
    if abs(kept - 1.0) <= SAMPLE_ROUNDING * eps and abs(factor * size - 1.0) <= SAMPLE_ROUNDING * eps:
        return 1.0, 1.0 / size
    return float(kept), float(factor)


def follow_rows(series: RowSeries, size: int, common: tuple[float, float], *, coarse: bool) -> Factors:
    """Follow a divided gradient from its backwards to the step.

    Args:
        series: what the processes exchanged of it.
        size: the number of processes.
        common: the factors a and f of all divided gradients together, which are tried first.
        coarse: whether gradients may be rounded coarsely where they are reduced.
    """
    final = series.rows.final
    if final is None:
        return Factors({})
    following = _RowFollowing(series, size, final, coarse)
    kept, factor = common
    for moment, micro in enumerate(series.micros if len(series.samples) > 1 else ()):
        if moment:
            following.between(moment, factor / kept if kept else factor)
        following.waiting.append(micro)
    if len(series.samples) == 1:
        following.waiting.extend(series.micros)
    last = _last(series)
    if last < 0:
        return Factors({}) if final.zero else Factors({}, NOT_REDUCED_BY_ROWS.format(size=size, residual=1.0))
    following.advance(series.rows.before[last], last, final.array, common, max(final.size, final.true_size))
    return Factors(following.factors, following.objection)


def _last(series: RowSeries) -> int:
    return len(series.micros) - 1 if len(series.samples) > 1 else min(0, len(series.micros) - 1)


@dataclass(slots=True)
class _RowFollowing:
    """One divided gradient on its way through a step.

    Attributes:
        series: what the processes exchanged of it.
        size: the number of processes.
        final: the sample at the step.
        coarse: whether the gradient may be rounded coarsely where it is reduced.
        factors: backward -> its factor so far, of those that were reduced.
        waiting: the backwards that are in the processes' own gradients.
        objection: what the identity does not cover, in words.
    """

    series: RowSeries
    size: int
    final: GradientSample
    coarse: bool
    factors: dict[int, float] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)
    objection: str | None = None

    def between(self, moment: int, factor: float) -> None:
        """Apply what happened before the backward of a moment, where an own gradient is reduced by a likely factor."""
        series = self.series
        if series.unchanged[moment - 1] == self.size:
            return  # nothing was reduced
        if series.rows.gone[moment] != self.size:
            self.objection = self.objection or HALF_REDUCED
            return
        now = series.rows.before[moment]
        self.advance(series.rows.before[moment - 1], moment - 1, now, (1.0, factor), length(now))

    def advance(
        self, before: Float64Array, moment: int, now: Float64Array, likely: tuple[float, float], size: float
    ) -> None:
        """Apply one reduction: of own gradients as they were after the backward of a moment."""
        summed, lengths = self.series.samples[moment], float(self.series.lengths[moment])
        if not all(np.isfinite(array).all() for array in (before, summed, now)):
            self.objection = self.objection or NOT_FINITE
            return
        kept, factor = likely
        residual = self._residual(before, summed, now, kept, factor)
        if residual > self._bound(before, kept, factor * lengths, size):
            columns = np.stack([before, summed], axis=1)
            kept, factor = np.linalg.lstsq(columns, now, rcond=None)[0].tolist()
            residual = self._residual(before, summed, now, kept, factor)
            if residual > self._bound(before, kept, factor * lengths, size):
                share = residual / size if size else math.nan
                self.objection = self.objection or NOT_REDUCED_BY_ROWS.format(size=self.size, residual=share)
                kept = factor = math.nan
        self.factors = {micro: kept * one for micro, one in self.factors.items()}
        self.factors |= dict.fromkeys(self.waiting, factor)
        self.waiting = []

    def _residual(
        self, before: Float64Array, summed: Float64Array, now: Float64Array, kept: float, factor: float
    ) -> float:
        return length(now - kept * before - factor * summed)

    def _bound(self, before: Float64Array, kept: float, lengths: float, size: float) -> float:
        """Return how large a difference rounding explains."""
        limits = torch.finfo(self.final.elements.dtype)
        eps = COARSE_ROUNDING if self.coarse else limits.eps
        units = SAMPLE_ROUNDING + self.size + (2 * math.sqrt(self.series.width) if self.final.projected else 0)
        return units * eps * max(abs(kept) * length(before), abs(lengths), size) + limits.smallest_normal / limits.eps
