"""Path contributions of single samples: from the last step to the first, over the segments that a path was cut into.

The path is followed forwards first (`path_contributions.py`), which chooses segments and points. With ḡ_r the mean
gradient of the quantity on segment r, a pattern's part is the sum over segments of ⟨ḡ_r, change of the pattern's
share⟩. A share is moved by linear steps, so the sum is one product with the pattern's own gradient g_t,

    part_t  =  factor · ⟨A_s, g_t⟩        with s the pattern's step

and A_s is carried from the last step to the first. With the step's numbers and matrices
(`identity/families/elementwise.py`) and v = ḡ_r + P on W', u on m':

    a = u − P_s ⊙ v        w = β ⊙ a − Q_s ⊙ v        A_s = sign · w
    u ← α a                P ← κ P + (κ − 1) ḡ_r + decay · w

from P = u = 0 behind the last step. There is one A_s per input: memory 3 × inputs × parameters. Where steps are
numbers without decay (SGD), P stays 0 and A_s is a sum over few segments, Σ_r c_r(s) ḡ_r, with ḡ_r as the inputs' own
keys h and errors δ: the product is (e_t · δ)(x_t · h), and no gradient in the shape of the parameter is made.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from dualform.effects.path_probe import PathProbe, State, UnitRows
from dualform.effects.path_shares import step_in_dtype, takes_decay
from dualform.engine.parameter_steps import Following, GroupsByPart, ParameterSteps, RetakenStep, optimizer_of
from dualform.engine.shares import GroupsOfCalls
from dualform.engine.source import PatternSource
from dualform.engine.stored_calls import StepReader, StoredCall
from dualform.identity.families.elementwise_step import ElementwiseStep
from dualform.identity.families.optimizer_kind import StepMap
from dualform.identity.families.optimizer_replay import OptimizerReplay
from dualform.identity.parameter_use import ParameterUse
from dualform.progress import bar

BLOCK_BYTES = 1 << 31
"""Bytes of the gradients and adjoints of one block of units; units beyond it are another round through the steps."""

PRODUCT_ELEMENTS = 1 << 24
"""The most elements that one product of units and patterns makes at once."""

NEGLIGIBLE = 1e-14
"""A segment's number on a step's gradients below which the segment is dropped: it is beyond float64."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a path that was replaced by its chord.

    Attributes:
        start: how many steps were taken before it.
        end: how many steps were taken after it.
        points: at how many points the gradient is taken.
    """

    start: int
    end: int
    points: int


def chunk_length(steps: int) -> int:
    """Return after how many steps the replay of an optimizer is kept; segments end there.

    >>> chunk_length(100)
    10
    """
    return max(1, math.isqrt(steps))


def nodes_of(points: int) -> list[tuple[float, float]]:
    """Return the points of a chord, from 0 to 1, and their weights: those of Gauss and Legendre."""
    nodes, weights = np.polynomial.legendre.leggauss(points)
    return [(float(node), float(weight)) for node, weight in zip((nodes + 1) / 2, weights / 2, strict=True)]


def interpolate(start: State, end: State, at: float) -> dict[str, Tensor]:
    """Return tensors at a point between two ends; whole numbers are those of the later end."""
    return {
        name: torch.lerp(tensor, end[name], at) if tensor.is_floating_point() else end[name]
        for name, tensor in start.items()
    }


@dataclass(frozen=True, slots=True)
class _TakenStep:
    """What a step did to one parameter: its map, and its calls with what multiplies their gradients."""

    linear: ElementwiseStep
    calls: list[tuple[StoredCall, ParameterUse, float]]


def find_sample_parts(
    source: PatternSource,
    probe: PathProbe,
    segments: Sequence[Segment],
    by: GroupsByPart,
    groups: int,
    *,
    state_at: Callable[[int], State],
    knots: Mapping[int, Mapping[str, Tensor]] | None = None,
) -> Tensor:
    """Return the part of each of many groups of patterns through each layer, (U, G, L), float64 on the CPU.

    Args:
        source: the source of the patterns; they are read from the last step to the first.
        probe: the model and the inputs, whose quantity was found before.
        segments: the segments of the path, in their order; none goes across a multiple of `chunk_length`.
        by: the group of each pattern, for example its sample.
        groups: how many groups there are.
        state_at: the uncovered state after any number of steps.
        knots: the weights at the ends of all segments, by step, which spare a replay; None if they were not kept.
    """
    total = torch.zeros(len(probe.names), probe.units, groups, dtype=torch.float64, device=probe.device)
    if not segments:
        return total.permute(1, 2, 0).cpu()
    parameters = tuple(dict.fromkeys(p for entry in source.layers.values() for p in entry.parameters.values()))
    elements = sum(math.prod(source.description.parameters[name].shape) for name in parameters)
    size = max(1, BLOCK_BYTES // (3 * 4 * elements))
    for first in range(0, probe.units, size):
        units = range(first, min(first + size, probe.units))
        way = _WayBack(source, probe, units, by, total[:, units.start : units.stop])
        for chunk in _chunks(source, parameters, segments, knots):
            for segment, weights, steps in chunk:
                way.enter(_mean_rows(probe, segment, weights, state_at))
                way.go_back(steps)
                way.leave()
    return total.permute(1, 2, 0).cpu()


def _mean_rows(
    probe: PathProbe,
    segment: Segment,
    weights: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    state_at: Callable[[int], State],
) -> list[UnitRows]:
    """Return the inputs' keys and errors at all points of a segment, the errors times the points' weights."""
    states = state_at(segment.start), state_at(segment.end)
    found = []
    for at, weight in nodes_of(segment.points):
        probe.put(interpolate(*weights, at), interpolate(*states, at))
        found += [
            UnitRows(rows.layer, rows.keys, rows.values * weight, rows.units)
            for batch in probe.rows()
            for rows in batch
        ]
    return found


_Piece = tuple[Segment, tuple[Mapping[str, Tensor], Mapping[str, Tensor]], list[dict[str, _TakenStep]]]


def _chunks(
    source: PatternSource,
    parameters: Sequence[str],
    segments: Sequence[Segment],
    knots: Mapping[int, Mapping[str, Tensor]] | None,
) -> Iterator[Iterator[_Piece]]:
    """Yield chunks of steps from the last to the first: each segment, the weights at both its ends, and its steps.

    Where the weights at the ends of segments are not known, or steps' maps do not follow from settings, steps are
    replayed forwards once to keep the optimizers every `chunk_length` steps, and once more chunk by chunk: about
    sqrt(S) steps' maps and patterns are held, never all.
    """
    steps = segments[-1].end
    length = chunk_length(steps)
    reader = StepReader(source, parameters)
    running = {name: _Running(source, name, from_settings=knots is not None) for name in parameters}
    replayed = [parameter for parameter in running.values() if parameter.is_replayed]
    starts = range(0, steps, length)
    with bar("going back", total=(1 + bool(replayed)) * steps) as advance:
        for step in range(steps if replayed else 0):
            if step % length == 0:
                for parameter in replayed:
                    parameter.save()
            calls = reader.calls(step)
            for parameter in replayed:
                parameter.take(step, calls)
            advance(1)
        for number, first in reversed(list(enumerate(starts))):
            last = min(first + length, steps)
            mine = [segment for segment in segments if first <= segment.start and segment.end <= last]
            ends = {segment.start for segment in mine} | {segment.end for segment in mine}
            for parameter in replayed:
                parameter.go_to(number)
            weights = {} if knots is None else {end: knots[end] for end in ends}
            if knots is None:
                weights[first] = {name: parameter.weight for name, parameter in running.items()}
            taken: list[dict[str, _TakenStep]] = []
            for step in range(first, last):
                calls = reader.calls(step)
                found = {name: parameter.take(step, calls) for name, parameter in running.items()}
                taken.append({name: one for name, one in found.items() if one is not None})
                if knots is None and step + 1 in ends:
                    weights[step + 1] = {name: parameter.weight for name, parameter in running.items()}
                advance(1)
            yield (
                (
                    segment,
                    (weights[segment.start], weights[segment.end]),
                    taken[segment.start - first : segment.end - first],
                )
                for segment in reversed(mine)
            )


class _Running:
    """One parameter whose steps are taken again, or read from settings where that is enough."""

    def __init__(self, source: PatternSource, name: str, *, from_settings: bool) -> None:
        self._steps = ParameterSteps(source, name, from_settings=from_settings)
        self.is_replayed = not (from_settings and self._steps.replay.kind.has_coefficients)
        self._last = None if self.is_replayed else _LastStep()
        if self._last is not None:
            self._steps.followings.append(self._last)
        self._saved: list[OptimizerReplay] = []

    def save(self) -> None:
        """Keep the replay as it is, at the start of the next chunk."""
        self._saved.append(self._steps.replay.copy())

    def go_to(self, chunk: int) -> None:
        """Stand where a chunk starts."""
        self._steps.replay = self._saved[chunk]

    @property
    def weight(self) -> Tensor:
        """The parameter as it is."""
        return self._steps.replay.parameter.detach().double().clone()

    def take(self, step: int, calls: Sequence[StoredCall]) -> _TakenStep | None:
        """Take a step, and return what it did; None if the parameter was not updated in it."""
        taken = self._steps.take(step, calls)
        if self._last is not None:
            found, self._last.found = self._last.found, None
            return found
        if taken is None:
            return None
        assert isinstance(taken.linear, ElementwiseStep), "other families are refused before"
        mine = [(call, use, float(taken.factors[call.micro])) for call, use in taken.calls]
        return _TakenStep(taken.linear, [each for each in mine if each[2] != 0.0])


class _LastStep(Following[None]):
    """Keeps the last step that was read from settings, until it is fetched."""

    def __init__(self) -> None:
        self.found: _TakenStep | None = None

    def add_step(self, linear: StepMap, calls: Sequence[tuple[StoredCall, ParameterUse, float]]) -> None:
        assert isinstance(linear, ElementwiseStep), "a step of numbers is one of the elementwise family"
        self.found = _TakenStep(linear, list(calls))

    def after_step(self, taken: RetakenStep) -> None:
        raise AssertionError("steps of numbers are not taken again")

    def result(self) -> None:
        """Return nothing."""


class _WayBack:
    """What multiplies the gradients of the steps, for a block of units, on the way from the last step to the first."""

    def __init__(self, source: PatternSource, probe: PathProbe, units: range, by: GroupsByPart, total: Tensor) -> None:
        self._column = {name: i for i, name in enumerate(probe.names)}
        self._units = units
        self._device = probe.device
        self._groups_of = GroupsOfCalls(by)
        self._total = total  # (L, U, G) of these units
        self._shapes = {name: about.shape for name, about in source.description.parameters.items()}
        self._uses: dict[str, list[tuple[str, ParameterUse]]] = {}
        for layer, entry in source.layers.items():
            for use in entry.uses:
                self._uses.setdefault(use.parameter, []).append((layer, use))
        self._by_numbers = {
            name for name in self._uses if optimizer_of(source, name).has_coefficients and not takes_decay(source, name)
        }
        self._live: list[_LiveSegment] = []
        self._adjoints: dict[str, _Adjoint] = {}

    def enter(self, rows: Sequence[UnitRows]) -> None:
        """Come to the end of a segment, whose mean gradient the inputs' rows make."""
        first, last = self._units.start, self._units.stop
        mine: dict[str, list[UnitRows]] = {}
        for each in rows:
            kept = (each.units >= first) & (each.units < last)
            here = UnitRows(each.layer, each.keys[kept], each.values[kept], each.units[kept] - first)
            mine.setdefault(each.layer, []).append(here)
        self._live.insert(0, _LiveSegment(mine))

    def leave(self) -> None:
        """Come to the start of the segment: what was on W there belongs to the segment no more."""
        self._live[0].leave()
        self._live = [segment for segment in self._live if segment.matters]
        for adjoint in self._adjoints.values():
            adjoint.gradient = None

    def go_back(self, steps: Sequence[Mapping[str, _TakenStep]]) -> None:
        """Go back over the steps of a segment, and add the parts of their patterns."""
        for step in reversed(steps):
            for name, taken in step.items():
                if name in self._by_numbers:
                    for segment in self._live:
                        segment.step(name, taken.linear)
                    self._add(taken, self._by_segments)
                else:
                    self._add(taken, partial(_products_with, self._adjoint(name).step(taken.linear)))

    def _by_segments(self, use: ParameterUse, keys: Tensor, values: Tensor) -> Tensor:
        """Return the product of A_s with each pattern of a call, (U, n), as a sum over segments."""
        name, units = use.parameter, len(self._units)
        total = values.new_zeros(units, len(values))
        for segment in self._live:
            number = segment.number(name)
            if not number:
                continue
            found = segment.products(self._uses[name], use, (keys, values), units)
            if found is None:
                dense = segment.dense(self._uses[name], self._shapes[name], units)
                found = dense_products(use, dense.to(values), keys, values)
            total += number * found
        return total

    def _adjoint(self, name: str) -> "_Adjoint":
        """Return the adjoint of a parameter, with the gradient of the segment that is gone through."""
        if name not in self._adjoints:
            self._adjoints[name] = _Adjoint()
        adjoint = self._adjoints[name]
        if adjoint.gradient is None:
            adjoint.gradient = (
                self._live[0].dense(self._uses[name], self._shapes[name], len(self._units)).to(self._device)
            )
        return adjoint

    def _add(self, taken: _TakenStep, products: Callable[[ParameterUse, Tensor, Tensor], Tensor]) -> None:
        """Add the products of a step's patterns to the parts of their groups."""
        for call, use, factor in taken.calls:
            found = products(use, call.keys.to(self._device), call.values.to(self._device)).double() * factor
            codes = self._groups_of.of(call)
            if codes is None:
                codes = torch.zeros(found.shape[1], dtype=torch.int64)
            kept = codes >= 0
            if not bool(kept.all()):
                found, codes = found[:, kept.to(self._device)], codes[kept]
            self._total[self._column[call.layer]].index_add_(1, codes.to(self._device), found)


def _products_with(matrices: Tensor, use: ParameterUse, keys: Tensor, values: Tensor) -> Tensor:
    return dense_products(use, matrices, keys, values)


class _LiveSegment:
    """The mean gradient of one segment, and the numbers (v, u) that it has on (W, m) of each parameter by now."""

    def __init__(self, rows: Mapping[str, Sequence[UnitRows]]) -> None:
        self._rows = rows
        self._numbers: dict[str, tuple[float, float, float]] = {}  # v, u, and the number on the step's gradients
        self._entered = 1.0  # what v is of a parameter that has not been stepped over yet

    def step(self, name: str, linear: ElementwiseStep) -> None:
        """Go back over a step of numbers of one parameter."""
        on_weight, on_average, _ = self._numbers.get(name, (self._entered, 0.0, 0.0))
        average = on_average - float(linear.on_average) * on_weight
        moved = float(linear.beta) * average - float(linear.on_gradient) * on_weight
        self._numbers[name] = (on_weight, linear.alpha * average, linear.sign * moved)

    def leave(self) -> None:
        """Come to the segment's start."""
        self._entered = 0.0
        self._numbers = {name: (0.0, u, number) for name, (_, u, number) in self._numbers.items()}

    @property
    def matters(self) -> bool:
        """Whether the segment still has a number on earlier gradients."""
        return any(abs(v) > NEGLIGIBLE or abs(u) > NEGLIGIBLE for v, u, _ in self._numbers.values())

    def number(self, name: str) -> float:
        """Return what multiplies ⟨ḡ, g⟩ for the gradients g of the step that was gone back over last."""
        return self._numbers[name][2]

    def products(
        self,
        uses: Sequence[tuple[str, ParameterUse]],
        use: ParameterUse,
        pattern_rows: tuple[Tensor, Tensor],
        units: int,
    ) -> Tensor | None:
        """Return ⟨ḡ, gradient⟩ for each unit and pattern, (U, n); None where dense gradients cost less or are needed.

        Args:
            uses: every layer that uses the parameter, and how.
            use: how the patterns' layer uses it.
            pattern_rows: keys (n, d_in) and values (n, d_out) of the patterns.
            units: how many units there are.
        """
        keys, values = pattern_rows
        maps = [use.parameter_map, *(each.parameter_map for _, each in uses)]
        is_bias = all(each.is_plain_bias for each in maps)
        if not is_bias and not all(each.is_plain_matrix for each in maps):
            return None
        rows = [each for layer, _ in uses for each in self._rows.get(layer, ())]
        d_in, d_out = keys.shape[1], values.shape[1]
        if not is_bias and sum(len(each.units) for each in rows) * (d_in + d_out) > units * d_in * d_out:
            return None
        total = values.new_zeros(units, len(values))
        for each in rows:
            step = max(1, PRODUCT_ELEMENTS // max(1, len(values)))
            for first in range(0, len(each.units), step):
                part = slice(first, first + step)
                found = each.values[part] @ values.T
                if not is_bias:
                    found *= each.keys[part] @ keys.T
                total.index_add_(0, each.units[part], found)
        return total

    def dense(self, uses: Sequence[tuple[str, ParameterUse]], shape: Sequence[int], units: int) -> Tensor:
        """Return the mean gradient of a parameter for each unit, (U, ...)."""
        rows = [(use, each) for layer, use in uses for each in self._rows.get(layer, ())]
        if not rows:
            return torch.zeros(units, *shape)
        total = rows[0][1].values.new_zeros(units, *shape)
        for use, each in rows:
            add_gradients(total, use, each)
        return total


def add_gradients(total: Tensor, use: ParameterUse, rows: UnitRows) -> None:
    """Add the gradient that each unit's rows make to the units' gradients (U, ...), in place."""
    parameter_map = use.parameter_map
    if parameter_map.is_plain_bias:
        total.view(len(total), -1).index_add_(0, rows.units, rows.values)
        return
    order = rows.units.argsort(stable=True)
    present, counts = rows.units.unique(return_counts=True)
    keys, values = rows.keys[order], rows.values[order]
    if parameter_map.is_plain_matrix and len(present) and bool((counts == counts[0]).all()):
        each = int(counts[0])
        found = torch.bmm(values.view(len(present), each, -1).transpose(1, 2), keys.view(len(present), each, -1))
        total.index_add_(0, present, found.view(len(present), *total.shape[1:]))
        return
    first = 0
    for unit, count in zip(present.tolist(), counts.tolist(), strict=True):
        mine = slice(first, first + count)
        total[unit] += parameter_map.gradient(values[mine], keys[mine], total.shape[1:]).view(total.shape[1:])
        first += count


def dense_products(use: ParameterUse, matrices: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return ⟨matrix, gradient⟩ for each unit's matrix (U, ...) and each pattern, (U, n).

    Args:
        use: how the patterns' layer uses the parameter.
        matrices: (U, ...) in the parameter's shape.
        keys: (n, d_in)
        values: (n, d_out)
    """
    parameter_map = use.parameter_map
    if parameter_map.is_plain_bias:
        return matrices.flatten(1).to(values.dtype) @ values.T
    if not parameter_map.is_plain_matrix:
        return torch.stack([(parameter_map.apply(one.to(values.dtype), keys) * values).sum(1) for one in matrices])
    wide = matrices.flatten(2).to(values.dtype)
    step = max(1, PRODUCT_ELEMENTS // max(1, values.numel()))
    found = []
    for first in range(0, len(wide), step):
        moved = wide[first : first + step] @ keys.T  # (u, d_out, n)
        found.append((moved * values.T).sum(1))
    return torch.cat(found)


class _Adjoint:
    """P and u of one parameter for each unit, (U, ...), and the mean gradient of the segment that is gone through."""

    def __init__(self) -> None:
        self.gradient: Tensor | None = None
        self._carried: Tensor | float = 0.0  # P
        self._on_average: Tensor | float = 0.0  # u

    def step(self, linear: ElementwiseStep) -> Tensor:
        """Go back over one step, and return A_s of each unit, (U, ...)."""
        gradient = self.gradient
        assert gradient is not None, "a step lies in a segment"
        linear = step_in_dtype(linear, gradient.dtype, gradient.device)
        on_weight = gradient + self._carried
        average = self._on_average - linear.on_average * on_weight
        moved = linear.beta * average - linear.on_gradient * on_weight
        self._on_average = linear.alpha * average
        if linear.kappa != 1.0 or linear.decay:
            self._carried = linear.kappa * on_weight - gradient + linear.decay * moved
        return linear.sign * moved
