"""Path contributions: a quantity of the network's output as a sum over what it was trained on, through all layers.

Along the path of weights that the training took, the quantity f of a test input changed by

    f(W_S) − f(W_0)  =  sum over steps of the integral of ⟨grad f, dW⟩ along the step

and W is, at every step, the sum of what is left of the start and of each group's share. So the change is a sum over
groups: part_g = sum over segments of ⟨mean gradient on the segment, change of share_g⟩. What is left of the start
changes too (decay), and belongs to the start's part.

A segment of several steps is replaced by its chord. How much that matters is seen by halving it: each segment is
computed whole and in two halves, the halves count, and their difference steers how long the next segment is. The mean
gradient is taken at a few points of each chord (Gauss and Legendre's); how much that matters is the residual, the
change of f that the parts do not add up to.

It is an account of this training, not a prediction of another one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dualform.effects.output_gradients import Quantity, inputs_of_queries, quantity_of_batch, run_backward
from dualform.effects.path_shares import PathShares, SharesNow
from dualform.engine.description import LayerEntry
from dualform.engine.jobs import Fold
from dualform.engine.model_layers import find_watched, move
from dualform.engine.parameter_steps import Following, GroupsByPart, Onlooker
from dualform.engine.source import PatternSource
from dualform.identity.parameter_use import ParameterUse
from dualform.modes import evaluation_copy
from dualform.recording.watch import plain_name

MOST_POINTS = 8
SHORTEST = 1  # steps of half a segment
GROW_BELOW = 0.25  # of the tolerance: a segment whose parts change less than this when halved is followed by a longer


@dataclass(frozen=True, slots=True)
class PathSettings:
    """How finely a path is followed.

    Attributes:
        tolerance: how much parts may change when segments are halved, and the residual be, both relative.
        points: at how many points of a segment the gradient is taken at first; by default more where the tolerance is
            small.
        halves: the steps of half a segment at first.
        longest: the most steps of half a segment; with 1 every step is a segment.
    """

    tolerance: float = 0.02
    points: int | None = None
    halves: int = 1
    longest: int = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class PathParts:
    """What was found along a path, for M inputs, G groups and L layers, float64.

    Attributes:
        before: (M,) the quantity before the first step.
        after: (M,) the quantity after the last.
        parts: (M, G + 3, L) the part of each group through each layer; then those of the start, of rounding, and of the
            state that no layer covers, which stands in the first layer's column.
        changes: (M, G + 3) how much the parts change when every segment is taken whole instead of in halves; segments
            whose halves are single steps do not count, since the path is straight there.
        bins: (M, G + 3, B) the parts of each bin of steps, where they were asked for.
        evaluations: how many times the gradient of all inputs was found.
        segments: how many segments there were, and the steps of the longest.
        longest: the steps of the longest segment.
    """

    before: Tensor
    after: Tensor
    parts: Tensor
    changes: Tensor
    bins: Tensor | None
    evaluations: int
    segments: int
    longest: int

    @property
    def residual(self) -> Tensor:
        """The change of the quantity that the parts do not add up to, (M,)."""
        return self.after - self.before - self.parts.sum((1, 2))

    @property
    def parts_error(self) -> float:
        """How far the parts are from those of a finer path, relative to their size: an estimate.

        Halving a segment takes three quarters of its error away, so that a third of the change is left.
        """
        size = float(self.parts.sum(2).abs().sum())
        return float(self.changes.abs().sum()) / 3 / size if size else 0.0


State = Mapping[str, Tensor]
"""Uncovered parameters and buffers, by name."""


class PathProbe:
    """The model on the way: finds the quantity of every input, and its gradient's product with changes of weights."""

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        targets: Tensor | None,
        quantity: Quantity,
        layers: Mapping[str, LayerEntry],
        *,
        batch_axis: int,
    ) -> None:
        """Prepare a copy of the model.

        Args:
            model: a model of the recorded structure, on the device to compute on; it stays as it is.
            batches: what it is called with, one after the other.
            targets: of all inputs together; the model's own answer, where None, must be made into targets before.
            quantity: the quantity.
            layers: all recorded layers.
            batch_axis: which leading axis of inputs and outputs counts the inputs.
        """
        self._model = evaluation_copy(model)
        self._parameters = {plain_name(name): p for name, p in self._model.named_parameters()}
        self._buffers = {plain_name(name): b for name, b in self._model.named_buffers()}
        self.device = next((p.device for p in self._parameters.values()), torch.device("cpu"))
        self._batches = [move(batch, self.device) for batch in batches]
        self._targets = targets
        self._quantity = quantity
        self._layers = layers
        self._axis = batch_axis
        self._watched = find_watched(self._model, layers)
        self.names = list(layers)
        self.evaluations = 0

    @torch.no_grad()
    def put(self, weights: Mapping[str, Tensor], state: State) -> None:
        """Give the model these weights and this uncovered state."""
        for name, tensor in (*weights.items(), *state.items()):
            found = self._parameters.get(name, self._buffers.get(name))
            if found is not None:
                found.copy_(tensor)

    @torch.no_grad()
    def quantity(self) -> Tensor:
        """Return the quantity of every input, (M,), float64."""
        found: list[Tensor] = []
        for batch in self._batches:
            taken = sum(map(len, found))
            each = quantity_of_batch(self._model, batch, self._targets, taken, self._quantity, self._axis)
            found.append(each.double().cpu())
        return torch.cat(found)

    def products(self, changes: Mapping[str, Tensor]) -> Tensor:
        """Return ⟨gradient of the quantity, change⟩ through each layer, (M, K, L), float64.

        Args:
            changes: K changes of each parameter, (K, ...).
        """
        self.evaluations += 1
        taken, products = 0, []
        kinds = len(next(iter(changes.values())))
        for batch in self._batches:
            backward = run_backward(self._model, batch, self._targets, taken, self._quantity, self._watched, self._axis)
            count = len(backward.quantity)
            taken += count
            total = torch.zeros(kinds, count, len(self.names), dtype=torch.float64)
            for column, name in enumerate(self.names):
                for call in backward.calls[name]:
                    if not call.reached:
                        continue
                    keys = call.keys().detach().flatten(0, -2)
                    values = call.values(torch.zeros(0, device=self.device))
                    of = inputs_of_queries(call, count, self._axis)
                    for k in range(kinds):
                        each = self._rows(self._layers[name].uses, changes, k, keys, values)
                        total[k, :, column].index_add_(0, of, each)
            products.append(total.transpose(0, 1))
        return torch.cat(products)

    @staticmethod
    def _rows(
        uses: Sequence[ParameterUse], changes: Mapping[str, Tensor], k: int, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Return ⟨gradient, change⟩ of each row of one layer's call, (n,), float64 on the CPU."""
        total = torch.zeros(len(values), dtype=torch.float64)
        for use in uses:
            if use.parameter in changes:
                change = changes[use.parameter][k].to(values)
                total += (use.parameter_map.apply(change, keys) * values).double().sum(1).cpu()
        return total


@dataclass(frozen=True, slots=True, eq=False)
class _Point:
    """The path after some steps."""

    step: int
    weights: Mapping[str, Tensor]
    parts: Mapping[str, Tensor]  # (G + 2, ...)
    state: State
    quantity: Tensor


class _Path(Onlooker):
    """Looks at all parameters together, and integrates segment after segment."""

    def __init__(
        self,
        followings: Mapping[str, Following[SharesNow]],
        probe: PathProbe,
        settings: PathSettings,
        state_at: Callable[[int], State],
        horizon: int,
        bins: Callable[[int], int] | None,
    ) -> None:
        self._followings = followings
        self._probe = probe
        self._settings = settings
        self._state_at = state_at
        self._horizon = horizon
        self._bins = bins
        by_tolerance = 2 if settings.tolerance >= 1e-3 else 4 if settings.tolerance >= 1e-6 else MOST_POINTS
        self._points = settings.points or by_tolerance
        self._half = max(SHORTEST, settings.halves)
        self._first = self._here = self._look(0)
        self._middle: _Point | None = None
        self._sums: Tensor | None = None
        self._changes: Tensor | None = None
        self._binned: dict[int, Tensor] = {}
        self._segments = self._longest = 0

    def _look(self, steps: int) -> _Point:
        """Return the path after so many steps."""
        found = {name: following.result() for name, following in self._followings.items()}
        weights = {name: now.parameter for name, now in found.items()}
        state = self._state_at(steps)
        self._probe.put(weights, state)
        return _Point(steps, weights, {name: now.parts for name, now in found.items()}, state, self._probe.quantity())

    def after_step(self, step: int) -> None:
        """Integrate where a segment or its first half is complete."""
        done = step + 1
        last = done == self._horizon or (self._bins is not None and self._bins(done) != self._bins(step))
        if self._middle is None:
            if last or done == self._here.step + self._half:
                self._middle = self._look(done)
                if last:
                    self._close(self._middle, None)
        elif last or done == self._middle.step + self._half:
            self._close(self._middle, self._look(done))

    def _close(self, middle: _Point, end: _Point | None) -> None:
        """Take a segment in: two halves, or only one where the path or a bin of steps ends."""
        here, self._middle = self._here, None
        first = self._integral(here, middle)
        self._add(first, here, middle)
        if end is None:
            self._here = middle
            return
        second = self._integral(middle, end)
        self._add(second, middle, end)
        halves = first + second
        whole = self._integral(here, end)
        difference = (halves - whole).sum(2)
        exact = end.step - here.step == 2  # the path is straight within a step: halves of one step are no chords
        counted = torch.zeros_like(difference) if exact else difference
        self._changes = counted if self._changes is None else self._changes + counted
        self._here = end
        self._steer(halves.sum(2), difference, end.quantity - here.quantity)

    def _add(self, parts: Tensor, start: _Point, end: _Point) -> None:
        self._sums = parts if self._sums is None else self._sums + parts
        self._segments += 1
        self._longest = max(self._longest, end.step - start.step)
        if self._bins is not None:
            at = self._bins(start.step)
            flat = parts.sum(2)
            self._binned[at] = self._binned[at] + flat if at in self._binned else flat

    def _steer(self, halves: Tensor, difference: Tensor, change: Tensor) -> None:
        """Choose the length and the points of the next segment by what this one's halving changed."""
        size = float(halves.abs().sum())
        changed = float(difference.abs().sum()) / size if size else 0.0
        tolerance = self._settings.tolerance
        if changed > tolerance:
            self._half = max(SHORTEST, self._half // 2)
        elif changed < GROW_BELOW * tolerance:
            self._half = min(self._settings.longest, 2 * self._half)
        left = float((change - halves.sum(1)).abs().sum())
        if size and left / size > tolerance / 2 and self._points < MOST_POINTS:
            self._points *= 2

    def _integral(self, start: _Point, end: _Point) -> Tensor:
        """Return the parts of one segment, (M, G + 3, L)."""
        changes = {name: end.parts[name] - part for name, part in start.parts.items()}
        nodes, weights = np.polynomial.legendre.leggauss(self._points)
        total: Tensor | None = None
        for node, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
            at = float(node)
            self._probe.put(_between(start.weights, end.weights, at), _between(start.state, end.state, at))
            found = self._probe.products(changes) * float(weight)
            total = found if total is None else total + found
        assert total is not None, "there is at least one point"
        other = torch.zeros_like(total[:, :1])
        other[:, 0, 0] = self._state_part(start, end)
        return torch.cat([total, other], dim=1)

    def _state_part(self, start: _Point, end: _Point) -> Tensor:
        """Return what the change of the uncovered state did to the quantity, (M,): the mean over both ends' weights."""
        if all(torch.equal(end.state[name], tensor) for name, tensor in start.state.items()):
            return torch.zeros_like(start.quantity)
        self._probe.put(start.weights, end.state)
        early = self._probe.quantity() - start.quantity
        self._probe.put(end.weights, start.state)
        return (early + end.quantity - self._probe.quantity()) / 2

    def result(self) -> PathParts:
        """Return the parts."""
        end = self._here
        layers = len(self._probe.names)
        rows = len(next(iter(self._first.parts.values()))) + 1
        nothing = torch.zeros(len(end.quantity), rows, layers, dtype=torch.float64)
        parts = nothing if self._sums is None else self._sums
        bins = None
        if self._bins is not None:
            count = max(self._binned, default=-1) + 1
            empty = torch.zeros_like(parts.sum(2))
            bins = torch.stack([self._binned.get(i, empty) for i in range(count)], dim=2) if count else empty[..., None]
        return PathParts(
            before=self._first.quantity,
            after=end.quantity,
            parts=parts,
            changes=torch.zeros_like(parts.sum(2)) if self._changes is None else self._changes,
            bins=bins,
            evaluations=self._probe.evaluations,
            segments=self._segments,
            longest=self._longest,
        )


def _between(start: Mapping[str, Tensor], end: Mapping[str, Tensor], at: float) -> dict[str, Tensor]:
    return {
        name: torch.lerp(tensor, end[name], at) if tensor.is_floating_point() else end[name]
        for name, tensor in start.items()
    }


def state_between(known: Sequence[tuple[int, State]]) -> Callable[[int], State]:
    """Return the uncovered state after any number of steps, linear between those after which it is known.

    Before the first and after the last it is as there. Whole numbers are those of the later one.
    """

    def at(steps: int) -> State:
        after = [entry for entry in known if entry[0] >= steps]
        before = [entry for entry in known if entry[0] < steps]
        if not after or not before:
            return (after[0] if after else before[-1])[1] if known else {}
        (early, first), (late, last) = before[-1], after[0]
        shared = {name: tensor for name, tensor in first.items() if name in last}
        return {**last, **_between(shared, last, (steps - early) / (late - early))}

    return at


def path_fold(
    source: PatternSource,
    probe: PathProbe,
    *,
    horizon: int,
    groups: int,
    by: GroupsByPart | None,
    settings: PathSettings,
    known_state: Sequence[tuple[int, State]] = (),
    bins: Callable[[int], int] | None = None,
) -> Fold[SharesNow]:
    """Return the fold that finds path contributions; its result is `PathParts`.

    Args:
        source: the source of the patterns.
        probe: the model and the inputs.
        horizon: how many steps.
        groups: how many groups of patterns there are.
        by: the group of each pattern.
        settings: how finely the path is followed.
        known_state: the uncovered state, and after how many steps it was so.
        bins: the bin of each step, where parts are wanted by bins of steps.
    """
    parameters = tuple(dict.fromkeys(p for entry in source.layers.values() for p in entry.parameters.values()))
    state_at = state_between(known_state)
    return Fold(
        parameters,
        horizon,
        PathShares(groups),
        by,
        lambda followings: _Path(followings, probe, settings, state_at, horizon, bins),
    )


def step_bins(width: float) -> Callable[[int], int]:
    """Return the bin of each step, for bins of one width."""
    return lambda step: math.floor(step / width)
