"""The walk along a path of weights, segment by segment: each group's part of the change of a quantity.

Whoever follows the shares tells the walk where the path has come to and how each share has changed since; the walk
integrates. It knows nothing of where shares come from: stored patterns, a replay, or the live training.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dualform.effects.path_probe import PathProbe, State
from dualform.effects.path_samples import Segment, interpolate, nodes_of

MOST_POINTS = 8
SHRINK_ABOVE = 0.75
"""Change of all parts so far, of the tolerance, when two segments each are taken as one: above it segments shrink."""
GROW_BELOW = 0.375
"""The same change below which segments grow."""
RESIDUAL_OF_TOLERANCE = 0.25
"""The residual so far, of the tolerance, above which a segment's gradient is taken at twice as many points."""
FEWER_POINTS_BELOW = 1 / 16
"""The residual, of the largest that may be, below which the next segment begins with half as many points."""


@dataclass(frozen=True, slots=True)
class PathSettings:
    """How many groups are followed along a path, and how finely.

    Attributes:
        groups: how many groups there are.
        tolerance: how much parts may change when segments are halved, and the residual be, both relative.
        points: at how many points of a segment the gradient is taken at first; by default more where the tolerance is
            small.
        shortest: the fewest steps of a segment, which it has at first.
        longest: the most steps of a segment; with 1 every step is a segment.
        by_layer: whether parts through each layer are asked for, and not only their sums.
        knot_bytes: the most bytes of weights at the ends of segments that are kept, for the way back; 0 for none.
        ends_every: segments end after multiples of so many steps, whatever else they do; None for nowhere.
    """

    groups: int
    tolerance: float = 0.02
    points: int | None = None
    shortest: int = 1
    longest: int = 1 << 20
    by_layer: bool = False
    knot_bytes: int = 0
    ends_every: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PathParts:
    """What was found along a path, for U units of inputs, G groups and L layers, float64.

    Attributes:
        before: (U,) the quantity before the first step.
        after: (U,) the quantity after the last.
        parts: (U, G + 3, L) the part of each group through each layer; then those of the start, of rounding, and of the
            state that no layer covers, which stands in the first layer's column.
        changes: (U, G + 3, L) how much the parts change when two segments each are taken as one; single steps do not
            count, since the path is straight there.
        by_layer: whether parts through each layer were asked for, and not only their sums.
        bins: (U, G + 3, B) the parts of each bin of steps, where they were asked for.
        evaluations: how many times the gradient of all inputs was found.
        segments: the segments, in their order.
        knots: the weights at the ends of all segments, by step, in their own dtypes; None if they were not kept.
    """

    before: Tensor
    after: Tensor
    parts: Tensor
    changes: Tensor
    by_layer: bool
    bins: Tensor | None
    evaluations: int
    segments: tuple[Segment, ...]
    knots: Mapping[int, Mapping[str, Tensor]] | None

    @property
    def residual(self) -> Tensor:
        """The change of the quantity that the parts do not add up to, (U,)."""
        return self.after - self.before - self.parts.sum((1, 2))

    @property
    def parts_error(self) -> float:
        """How far the parts are from those of the path itself, relative to their size: an estimate.

        Halving a segment takes three quarters of its error away where the path is smooth, so that a third of the change
        is left; where steps are noise it takes half of the error's square away, so that all of it is left. Two thirds.
        """
        parts, changes = (self.parts, self.changes) if self.by_layer else (self.parts.sum(2), self.changes.sum(2))
        size = float(parts.abs().sum())
        return 2 / 3 * float(changes.abs().sum()) / size if size else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class _Point:
    """The path after some steps."""

    step: int
    weights: Mapping[str, Tensor]
    state: State
    quantity: Tensor  # (U,)


@dataclass(frozen=True, slots=True, eq=False)
class _Chord:
    """A piece of the path between two points: the changes of all shares, and the parts that its chord gives."""

    start: _Point
    end: _Point
    changes: Mapping[str, Tensor]  # (G + 2, ...) each
    parts: Tensor  # (U, G + 3, L)
    points: int


class PathWalk:
    """Integrates the gradient of a quantity along a path, as the path goes on."""

    def __init__(
        self,
        probe: PathProbe,
        settings: PathSettings,
        weights: Mapping[str, Tensor],
        state: State,
        bins: Callable[[int], int] | None = None,
    ) -> None:
        """Begin before the first step.

        Args:
            probe: the model and the inputs.
            settings: how many groups are followed, and how finely.
            weights: the parameters before the first step.
            state: the uncovered state before the first step.
            bins: the bin of each step, where parts are wanted by bins of steps.
        """
        self._probe = probe
        self._settings = settings
        self._bins = bins
        by_tolerance = 1 if settings.tolerance >= 1e-3 else 4 if settings.tolerance >= 1e-6 else MOST_POINTS
        self._points = self._fewest_points = settings.points or by_tolerance
        self._length = settings.shortest
        self._first = self._here = self._arrive(0, weights, state)
        self._earlier: _Chord | None = None  # the first half of a pair, until the second is complete
        self._left = torch.zeros_like(self._first.quantity)  # the residual so far
        self._sums: Tensor | None = None
        self._changes: Tensor | None = None
        self._binned: dict[int, Tensor] = {}
        self._segments: list[Segment] = []
        self._knots: dict[int, Mapping[str, Tensor]] | None = {} if settings.knot_bytes else None
        self._room = settings.knot_bytes
        self._keep_knot(self._first)

    @property
    def steps(self) -> int:
        """How many steps the path has up to where the walk stands."""
        return self._here.step

    def _keep_knot(self, point: _Point) -> None:
        """Keep the weights at the end of a segment, as the model has them, while there is room for them."""
        if self._knots is None:
            return
        self._knots[point.step] = {name: self._probe.as_parameter(name, w) for name, w in point.weights.items()}
        self._room -= sum(tensor.nbytes for tensor in self._knots[point.step].values())
        if self._room < 0:
            self._knots = None

    def _arrive(self, steps: int, weights: Mapping[str, Tensor], state: State) -> _Point:
        """Return the path after so many steps."""
        self._probe.put(weights, state)
        return _Point(steps, weights, state, self._probe.quantity())

    def is_forced(self, done: int) -> bool:
        """Say whether a segment has to end after so many steps, however short it is."""
        every = self._settings.ends_every
        return (every is not None and done % every == 0) or (
            self._bins is not None and self._bins(done) != self._bins(done - 1)
        )

    def is_due(self, done: int) -> bool:
        """Say whether a segment ends after so many steps."""
        return self.is_forced(done) or done >= self._here.step + self._length

    def limit(self, longest: int) -> None:
        """Take no segments of more steps from now on."""
        self._settings = replace(self._settings, longest=max(self._settings.shortest, longest))
        self._length = min(self._length, self._settings.longest)

    def go_to(
        self, done: int, weights: Mapping[str, Tensor], state: State, changes: Mapping[str, Tensor], *, alone: bool
    ) -> None:
        """Integrate a segment that ends after so many steps.

        Args:
            done: how many steps the path has now.
            weights: the parameters there, float64.
            state: the uncovered state there.
            changes: (G + 2, ...) how each parameter's shares have changed since the last segment: the groups', the
                start's, and the rest's. Groups may have become more.
            alone: whether the segment is compared with the one before it or with none, and not with a later one.
        """
        end = self._arrive(done, weights, state)
        parts = self._integral(self._here, end, changes)
        while (missed := self._missed(parts, end)) > 1 and self._points < MOST_POINTS:
            self._points *= 2
            parts = self._integral(self._here, end, changes)
        used = self._points
        if missed < FEWER_POINTS_BELOW:
            self._points = max(self._fewest_points, self._points // 2)
        segment = _Chord(self._here, end, changes, parts, used)
        self._add(segment)
        if self._earlier is not None:
            self._compare(self._earlier, segment)
            self._earlier = None
        elif not alone:
            self._earlier = segment
        self._here = end
        self._keep_knot(end)

    def _missed(self, parts: Tensor, end: _Point) -> float:
        """Return what the parts so far, with those of a new segment, do not add up to, relative to what they may miss.

        More points can only mend what the new segment misses, so four times that is the most that counts.
        """
        moved, so_far = end.quantity - self._here.quantity, end.quantity - self._first.quantity
        here = moved - parts.sum((1, 2))
        left = here + self._left
        size = max(float(moved.abs().sum()), float(so_far.abs().sum()))
        missed = min(float(left.abs().sum()), 4 * float(here.abs().sum()))
        return missed / (RESIDUAL_OF_TOLERANCE * self._settings.tolerance * size) if size else 0.0

    def _add(self, segment: _Chord) -> None:
        parts = segment.parts
        self._left = self._left + (segment.end.quantity - segment.start.quantity - parts.sum((1, 2)))
        groups = parts.shape[1] - 3
        self._sums = parts.clone() if self._sums is None else _for_groups(self._sums, groups, 1, 3).add_(parts)
        self._segments.append(Segment(segment.start.step, segment.end.step, segment.points))
        if self._bins is not None:
            at = self._bins(segment.start.step)
            flat = parts.sum(2)
            self._binned[at] = _for_groups(self._binned[at], groups, 1, 3) + flat if at in self._binned else flat

    def _compare(self, first: _Chord, second: _Chord) -> None:
        """Integrate two segments as one, to see what their chords are worth, and choose how to go on."""
        start, end = first.start, second.end
        groups = second.parts.shape[1] - 3
        changes = {
            name: _for_groups(change, groups, 0, 2).add_(second.changes[name]) for name, change in first.changes.items()
        }
        halves = _for_groups(first.parts, groups, 1, 3) + second.parts
        whole = self._integral(start, end, changes)
        difference = halves - whole
        exact = end.step - start.step == 2  # the path is straight within a step: halves of one step are no chords
        counted = torch.zeros_like(difference) if exact else difference
        self._changes = counted if self._changes is None else _for_groups(self._changes, groups, 1, 3) + counted
        self._steer(difference if exact else self._changes)

    def _steer(self, changed: Tensor) -> None:
        """Choose the length of the next segments by how far all parts so far are from those of segments twice as long.

        Parts through each layer are compared, since the parts of one group alone through all layers telescope.
        """
        assert self._sums is not None, "two segments were added"
        size = float(self._sums.abs().sum())
        error = float(changed.abs().sum()) / size if size else 0.0
        tolerance = self._settings.tolerance
        if error > SHRINK_ABOVE * tolerance:
            self._length = max(self._settings.shortest, self._length // 2)
        elif error < GROW_BELOW * tolerance:
            self._length = min(self._settings.longest, 2 * self._length)

    def _integral(self, start: _Point, end: _Point, changes: Mapping[str, Tensor]) -> Tensor:
        """Return the parts of one chord, (U, G + 3, L)."""
        total: Tensor | None = None
        for at, weight in nodes_of(self._points):
            self._probe.put(interpolate(start.weights, end.weights, at), interpolate(start.state, end.state, at))
            found = self._probe.products(changes) * weight
            total = found if total is None else total + found
        assert total is not None, "there is at least one point"
        total = total.cpu()
        other = torch.zeros_like(total[:, :1])
        other[:, 0, 0] = self._state_part(start, end)
        return torch.cat([total, other], dim=1)

    def _state_part(self, start: _Point, end: _Point) -> Tensor:
        """Return what the change of the uncovered state did to the quantity, (U,): the mean over both ends' weights."""
        if all(torch.equal(end.state[name], tensor) for name, tensor in start.state.items()):
            return torch.zeros_like(start.quantity)
        self._probe.put(start.weights, end.state)
        early = self._probe.quantity() - start.quantity
        self._probe.put(end.weights, start.state)
        return (early + end.quantity - self._probe.quantity()) / 2

    def result(self, final: Mapping[str, Tensor] | None = None) -> PathParts:
        """Return the parts; what live final parameters have beyond the end of the path is part of the rest."""
        end = self._here
        nothing = torch.zeros(len(end.quantity), self._settings.groups + 3, len(self._probe.names), dtype=torch.float64)
        parts = nothing if self._sums is None else self._sums
        groups = parts.shape[1] - 3
        bins = None
        if self._bins is not None:
            count = max(self._binned, default=-1) + 1
            empty = torch.zeros_like(parts.sum(2))
            found = [_for_groups(self._binned.get(i, empty), groups, 1, 3) for i in range(count)]
            bins = torch.stack(found, dim=2) if count else empty[..., None]
        after = end.quantity
        if final is not None:  # what no pattern explains, from the rebuilt weights to the live ones
            self._probe.put(final, end.state)
            after = self._probe.quantity()
            parts = parts.clone()
            parts[:, -2, 0] += after - end.quantity
        return PathParts(
            before=self._first.quantity,
            after=after,
            parts=parts,
            changes=torch.zeros_like(parts) if self._changes is None else _for_groups(self._changes, groups, 1, 3),
            by_layer=self._settings.by_layer,
            bins=bins,
            evaluations=self._probe.evaluations,
            segments=tuple(self._segments),
            knots=self._knots,
        )


def _for_groups(numbers: Tensor, groups: int, dim: int, tail: int) -> Tensor:
    """Return numbers by group with zeros for the groups that have come since; behind the groups are `tail` others."""
    more = groups - (numbers.shape[dim] - tail)
    if not more:
        return numbers
    known, others = numbers.split([numbers.shape[dim] - tail, tail], dim=dim)
    shape = list(numbers.shape)
    shape[dim] = more
    return torch.cat([known, numbers.new_zeros(shape), others], dim=dim)
