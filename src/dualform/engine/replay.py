"""Replay the optimizers that have no coefficients: one forward pass over the steps, from the recorded gradients.

Used for every optimizer in `dualform.identity.families.kinds()`. A step's gradient is summed again call by call, in the
order in which autograd summed it, torch's own optimizer takes the step, and each share (the start's, and each group's)
follows the linear map of that step. Only as many matrices are held as there are shares.

Where the optimizer rounds more coarsely than the parameter's dtype (Muon), what the step did beyond its linear map is
followed as one more share, that of rounding: parameter = start + shares + rounding.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualform.engine.addresses import Calls
from dualform.engine.description import LayerEntry
from dualform.engine.facts_check import state_problem
from dualform.engine.reading import Mask, decode, keep_all
from dualform.engine.source import PatternPart, PatternSource, Rows, find_part
from dualform.errors import CorruptError
from dualform.identity.families.kind import Multiplier, OptimizerKind, Spread, StepMap, require_optimizer_kind
from dualform.identity.families.optimizer_replay import OptimizerReplay, Share
from dualform.identity.families.rounding import machine
from dualform.identity.parameter_use import ParameterUse
from dualform.progress import bar
from dualform.recording.layers import sums_in_own_order
from dualform.recording.layouts import bias_gradient, laid_out
from dualform.recording.sinks import RESIDUAL

Codes = Callable[[PatternPart, str], npt.NDArray[np.int64] | None]
"""The group of each pattern of a part and layer, -1 for none; nothing where all are in group 0."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """The third term of a parameter: what coarse rounding left of all steps, beyond their linear maps.

    Attributes:
        term: the term, float64.
        expected: the size that it should have at random.
        parameter: the parameter as the replay left it.
        repeatable: whether the replay rounds as the live steps did: the same machine, whole patterns, and gradients
            that were not rescaled. Elsewhere the term is that of another rounding of the same steps.
    """

    term: Tensor
    expected: float
    parameter: Tensor
    repeatable: bool


@dataclass(frozen=True, slots=True)
class Replayed:
    """One parameter after its replay.

    Attributes:
        start: what is left of the start, float64.
        shares: (G, ...) each group's share, float64.
        rounding: the third term, where there is one.
        parameter: the parameter itself, as torch's own steps on the rebuilt gradients left it.
        state: the optimizer's state.
        noise: the size of what coarsely rounded gradients did beyond their patterns, at random.
    """

    start: Tensor
    shares: Tensor
    rounding: Rounding | None
    parameter: Tensor
    state: Mapping[str, Any]
    noise: float = 0.0

    @property
    def fixed(self) -> Tensor:
        """What no pattern adds, and every view keeps: start and rounding."""
        return self.start if self.rounding is None else self.start + self.rounding.term


@dataclass(frozen=True, slots=True)
class _Call:
    """The patterns of one call, decoded."""

    entry: LayerEntry
    micro: int
    keys: Tensor  # (n, d_in)
    values: Tensor  # (n, d_out)
    codes: Tensor | None  # (n,)
    layout: str | None
    whole: bool  # stored without loss, and summed as autograd does
    key_dtype: torch.dtype  # what its keys are stored in
    value_dtype: torch.dtype

    def gradient(self, use: ParameterUse, shape: Sequence[int]) -> Tensor:
        """Return its gradient of a parameter, summed as autograd summed it.

        A bias sums errors in the order in which they lie in memory. Where its true gradient is zero, as that of a key
        projection's bias, rounding is all there is of it, and Adam makes much of that.
        """
        if use.parameter_map.is_bias and self.layout is not None:
            return bias_gradient(use.parameter_map, laid_out(self.values, self.layout), shape)
        return use.parameter_map.gradient(self.values, self.keys, shape)

    def rounding(self, use: ParameterUse, shape: Sequence[int]) -> Tensor:
        """Return how far each element of the call's gradient may be from the one that autograd found, in float64.

        Two things are rounded: the sum over patterns, which in another order is off by up to half a unit in the last
        place of sum |value| |key|; and, at random, each key and value that is stored in a coarser dtype.
        """
        joined = use.parameter_map
        values, keys = self.values.double(), self.keys
        squares = keys  # integer keys are places, not numbers
        if keys.is_floating_point():
            keys = keys.double()
            squares = keys.square()
        found = torch.finfo(self.values.dtype).eps / 2 * joined.gradient(values.abs(), keys.abs(), shape)
        stored = torch.zeros_like(found)
        if self.value_dtype != self.values.dtype:
            stored += joined.gradient(_lost(values, self.value_dtype).square(), squares, shape)
        if self.key_dtype != self.keys.dtype and joined.multiplies_keys:
            stored += joined.gradient(values.square(), _lost(keys, self.key_dtype).square(), shape)
        return found + stored.sqrt()

    def exact(self, use: ParameterUse, shape: Sequence[int], rows: Tensor | slice = slice(None)) -> Tensor:
        """Return the gradient that (some of) the patterns give one of the layer's parameters, in float64."""
        keys = self.keys[rows]
        keys = keys.double() if keys.is_floating_point() else keys
        return use.parameter_map.gradient(self.values[rows].double(), keys, shape)


def replayed_parameters(run: PatternSource, layers: Collection[str]) -> tuple[str, ...]:
    """Return the parameters of these layers whose optimizer has to be replayed."""
    names = dict.fromkeys(p for layer in layers for p in run.layer(layer).parameters.values())
    return tuple(name for name in names if run.is_replayed(name))


def kept(mask: Mask) -> Codes:
    """Return the grouping whose only group is what a mask keeps."""

    def codes(part: PatternPart, layer: str) -> npt.NDArray[np.int64] | None:
        found = mask(part, layer)
        return None if found is None else np.where(found, 0, -1)

    return codes


def replay(
    run: PatternSource,
    layers: Collection[str],
    *,
    horizon: int,
    groups: int,
    codes: Codes,
    contributing: Collection[str] | None = None,
) -> dict[str, Replayed]:
    """Replay the parameters of these layers over the first `horizon` steps.

    Args:
        run: the run to read.
        layers: the layers whose parameters are wanted. All layers that share one of them are read.
        horizon: how many steps.
        groups: how many groups of patterns to follow; 0 for the start alone.
        codes: which group each pattern is in.
        contributing: the layers whose patterns the groups are made of; by default all.
    """
    names = replayed_parameters(run, layers)
    parameters = {name: _Parameter(run, name, groups) for name in names}
    reader = _Reader(run, names, codes, contributing)
    _take_steps(parameters.values(), reader, min(horizon, run.steps))
    return {name: parameter.result() for name, parameter in parameters.items()}


def _take_steps(parameters: Collection["_Parameter"], reader: "_Reader", steps: int) -> None:
    """Let parameters take the first steps again, from the patterns of each step."""
    with bar("replaying", total=steps) as advance:
        for step in range(steps):
            calls = reader.calls(step)
            for parameter in parameters:
                parameter.step(step, calls)
            advance(1)


def multipliers(
    run: PatternSource, layer: str, *, horizon: int
) -> Iterator[tuple[int, dict[ParameterUse, Multiplier]]]:
    """Yield, for each step from the last to the first, what multiplies its gradients in each of a layer's parameters.

    A multiplier depends on all later steps, so it is found backward, from segments of about sqrt(S) steps that are
    replayed once more; that many matrices are held, never S.
    """
    names = replayed_parameters(run, [layer])
    reader = _Reader(run, names, kept(keep_all), None)
    steps = min(horizon, run.steps)
    length = max(1, math.isqrt(steps))
    parameters = {name: _Parameter(run, name) for name in names}
    saved: list[dict[str, OptimizerReplay]] = []
    for step in range(steps):
        if step % length == 0:
            saved.append({name: parameter.replay.copy() for name, parameter in parameters.items()})
        calls = reader.calls(step)
        for parameter in parameters.values():
            parameter.step(step, calls)
    backward = {name: parameter.replay.kind.backward(run.initial[name].shape) for name, parameter in parameters.items()}
    for segment in reversed(range(len(saved))):
        maps: list[dict[str, StepMap]] = []
        for name, parameter in parameters.items():
            parameter.replay = saved[segment][name]
        for step in range(segment * length, min((segment + 1) * length, steps)):
            calls = reader.calls(step)
            found = {name: parameter.step(step, calls) for name, parameter in parameters.items()}
            maps.append({name: linear for name, linear in found.items() if linear is not None})
        for step in reversed(range(segment * length, segment * length + len(maps))):
            by_name = {name: backward[name].step(linear) for name, linear in maps.pop().items()}
            uses = run.layer(layer).uses
            yield step, {use: by_name[use.parameter] for use in uses if use.parameter in by_name}


def maps(run: PatternSource, layer: str, *, horizon: int) -> Iterator[tuple[int, dict[str, tuple[StepMap, Tensor]]]]:
    """Yield, for each step, the linear map of each of a layer's replayed parameters, and its gradient."""
    names = replayed_parameters(run, [layer])
    reader = _Reader(run, names, kept(keep_all), None)
    parameters = {name: _Parameter(run, name) for name in names}
    for step in range(min(horizon, run.steps)):
        calls = reader.calls(step)
        found = {}
        for name, parameter in parameters.items():
            if (linear := parameter.step(step, calls)) is not None:
                gradient = parameter.replay.parameter.grad
                assert gradient is not None, "the step was taken with it"
                found[name] = (linear, gradient)
        yield step, found


@dataclass(frozen=True, slots=True)
class Doubt:
    """How far each element of a parameter may be from its rebuilt value without anything being wrong.

    Attributes:
        spread: one standard deviation of what other roundings of the same gradients would have made of the element.
        replayed: the parameter as torch's own steps on the rebuilt gradients left it.
        largest: the most that rounding the element itself at every step can have added up to.

    All of them are in the parameter's shape, float64.
    """

    spread: Tensor
    replayed: Tensor
    largest: Tensor

    def drift(self, rebuilt: Tensor) -> Tensor:
        """Return where rounding has carried each element from its rebuilt value, as the replay shows it.

        A decay of 1 − 1e-5 and an update below half a unit in the last place are rounded to the same side at each step,
        so that this grows with the number of steps, not with its root. No more counts than rounding can do.
        """
        return (self.replayed - rebuilt).clamp(-self.largest, self.largest)

    def apart(self, rebuilt: Tensor, live: Tensor) -> Tensor:
        """Return how far each live element is from all that lies between its rebuilt value and the drift from it."""
        drift = self.drift(rebuilt)
        nearest = live.clamp(rebuilt + drift.clamp(max=0.0), rebuilt + drift.clamp(min=0.0))
        return (live - nearest).abs()


def doubts(run: PatternSource, names: Collection[str], *, horizon: int) -> dict[str, Doubt]:
    """Replay these parameters, and return how far each may be from its rebuilt value.

    Parameters that no step touched, or whose optimizer's own rounding is followed as a term, are left out.
    """
    wanted = [name for name in names if len(run.facts(name)[0].step) and not _kind(run, name).rounds]
    parameters = {name: _Parameter(run, name, doubted=True) for name in wanted}
    if parameters:
        reader = _Reader(run, list(parameters), kept(keep_all), None)
        _take_steps(parameters.values(), reader, min(horizon, run.steps))
    return {name: parameter.doubt() for name, parameter in parameters.items()}


def _kind(run: PatternSource, name: str) -> OptimizerKind[Any]:
    """Return the optimizer of a parameter, whose steps can be taken again."""
    return require_optimizer_kind(run.facts(name)[0].optimizer)


class _Parameter:
    """One parameter on its way through the steps.

    Its shares are followed where a number of groups is given, and the doubt about its gradients where `doubted`.
    """

    def __init__(self, run: PatternSource, name: str, groups: int | None = None, *, doubted: bool = False) -> None:
        facts, self._factors = run.facts(name)
        kind = _kind(run, name)
        initial, state = run.initial[name], run.initial_states.get(name, {})
        self._name = name
        self._settings = facts.settings
        if problem := state_problem(kind, state, self._row_at(0) if len(facts.step) else {}):
            raise CorruptError(f"{run.name}: parameter {name!r} at the start: {problem}. Restore the run from a copy.")
        self.replay = OptimizerReplay(kind, initial, state)
        self._start = None if groups is None else self.replay.share()
        self._shares = [Share(torch.zeros(initial.shape, dtype=torch.float64)) for _ in range(groups or 0)]
        followed = kind.rounds and groups is not None
        self._rounding = Share(torch.zeros(initial.shape, dtype=torch.float64)) if followed else None
        self._expected = 0.0
        self._noise = 0.0
        self._repeatable = True
        self._at = {int(step): i for i, step in enumerate(facts.step)}
        self._spread: Spread[Any] | None = kind.spread(initial.shape) if doubted else None
        self._travelled = torch.zeros(initial.shape, dtype=torch.float64) if doubted else None  # sum of |parameter|

    def step(self, step: int, calls: list[_Call]) -> StepMap | None:
        """Take a step, if this parameter was updated in it, and return its linear map."""
        if step not in self._at:
            return None
        # Autograd reaches the last call first, and sums in the order in which it reaches them.
        backward = [(call, use) for call in reversed(calls) for use in call.entry.uses]
        mine = [(call, use) for call, use in backward if use.parameter == self._name]
        micros = [m for m in sorted({call.micro for call, _ in mine}) if self._factors[step, m] != 0.0]
        gradient, parts, exact = self._gradients(mine, {m: float(self._factors[step, m]) for m in micros})
        row = self._row(step)
        before = None if self._rounding is None else self.replay.share()
        was = self.replay.parameter.detach().clone() if RESIDUAL in row else None
        settings = self.replay.kind.decode(row)
        try:
            linear: StepMap = self.replay.step(settings, gradient)
        except ArithmeticError as error:
            raise CorruptError(
                f"Step {step} of parameter {self._name!r} cannot be taken again ({error}): its logged settings, or the "
                "optimizer's state at the start, cannot be those of a training. Restore the run's files from a copy."
            ) from error
        if self._travelled is not None:
            self._travelled += self.replay.parameter.detach().double().abs()
        if self._spread is not None:
            self._spread.step(linear, settings, self._doubt(mine, self._factors[step], row.get(RESIDUAL, 0.0)))
        if was is not None and (size := float(gradient.double().norm())):
            moved = float((self.replay.parameter.detach() - was).double().norm())
            self._noise = math.hypot(self._noise, moved * row[RESIDUAL] / size)
        if self._start is not None:
            self._start.step(linear, None)
        for share, part in zip(self._shares, parts, strict=True):
            share.step(linear, part)
        if self._rounding is not None and before is not None:
            self._round(self._rounding, linear, before, exact)
            self._repeatable &= row.get("machine") == machine(gradient.device)
            self._repeatable &= all(self._factors[step, m] == 1.0 for m in micros)
            self._repeatable &= all(call.whole for call, _ in mine)
        return linear

    def _gradients(
        self, mine: list[tuple[_Call, ParameterUse]], factors: Mapping[int, float]
    ) -> tuple[Tensor, list[Tensor | None], Tensor]:
        """Return the step's gradient as autograd summed it, each group's part, and the exact sum, both in float64."""
        zero = torch.zeros_like(self.replay.parameter)
        parts: list[Tensor | None] = [None for _ in self._shares]
        exact = zero.double()
        # One factor for all backwards came last, as clipping does; otherwise each sum was multiplied in turn.
        common = next(iter(factors.values())) if len(set(factors.values())) == 1 else None
        total: Tensor | None = None
        for micro, factor in factors.items():
            backward: Tensor | None = None
            for call, use in [(c, u) for c, u in mine if c.micro == micro]:
                one = call.gradient(use, zero.shape)
                backward = one if backward is None else backward + one
                if self._rounding is not None:
                    one = call.exact(use, zero.shape)
                    exact = exact + one * factor
                if parts:
                    self._part(parts, use, call, one, factor)
            if backward is not None:
                scaled = backward if common is not None or factor == 1.0 else backward * factor
                total = scaled if total is None else total + scaled
        if total is not None and common is not None and common != 1.0:
            total = total * common
        return (zero if total is None else total.reshape(zero.shape)), parts, exact

    def _doubt(
        self, mine: list[tuple[_Call, ParameterUse]], factors: npt.NDArray[np.float64], residual: float
    ) -> Tensor:
        """Return how far each element of a step's gradient may be from the one that autograd found, at random.

        Args:
            mine: the calls that reach this parameter, each with its use of the parameter.
            factors: what the gradient of each backward was multiplied with.
            residual: how far the gradient was from its patterns' sum, where autocast rounded it. The rounding of
                each call's gradient is relative to that gradient, element by element.
        """
        shape = self.replay.parameter.shape
        rounding = torch.zeros(shape, dtype=torch.float64)
        coarse = torch.zeros(shape, dtype=torch.float64)
        for call, use in mine:
            factor = abs(float(factors[call.micro]))
            if factor:
                rounding += factor * call.rounding(use, shape).reshape(shape)
                if residual:
                    coarse += factor * call.gradient(use, shape).double().reshape(shape).abs()
        if residual and (size := float(coarse.norm())):
            rounding += residual / size * coarse
        return rounding

    def _part(self, parts: list[Tensor | None], use: ParameterUse, call: _Call, whole: Tensor, factor: float) -> None:
        """Add a call's gradient to its groups'."""
        if call.codes is None:
            members: list[tuple[int, Tensor]] = [(0, whole)]
        else:
            present = [code for code in call.codes.unique().tolist() if code >= 0]
            if len(present) == 1 and bool((call.codes >= 0).all()):
                members = [(present[0], whole)]
            else:
                members = []
                for code in present:
                    rows = call.codes == code
                    if self._rounding is None:
                        part = use.parameter_map.gradient(call.values[rows], call.keys[rows], whole.shape)
                    else:
                        part = call.exact(use, whole.shape, rows)
                    members.append((code, part))
        for code, gradient in members:
            scaled = gradient.double().reshape(self.replay.parameter.shape) * factor
            earlier = parts[code]
            parts[code] = scaled if earlier is None else earlier + scaled

    def _round(self, rounding: Share, linear: StepMap, moved: Share, gradient: Tensor) -> None:
        """Let the rounding so far follow a step, and add what the step did beyond its linear map."""
        after = self.replay.share()
        moved.step(linear, gradient)
        rounding.step(linear, None)
        rounding.weight = rounding.weight + (after.weight - moved.weight)
        rounding.average = rounding.average + (after.average - moved.average)
        self._expected = math.hypot(linear.kappa * self._expected, linear.noise)

    def _row(self, step: int) -> dict[str, Any]:
        """Return the settings of a step as they were logged, without what other optimizers' parameters have."""
        return self._row_at(self._at[step])

    def _row_at(self, update: int) -> dict[str, Any]:
        """Return the settings of one of the parameter's updates, counted from 0."""
        cells = {name: column[update] for name, column in self._settings.items()}
        known = {name: cell for name, cell in cells.items() if cell is not None and cell == cell}
        return {name: cell.item() if isinstance(cell, np.generic) else cell for name, cell in known.items()}

    def doubt(self) -> Doubt:
        """Return how far the parameter may be from its rebuilt value."""
        assert self._travelled is not None, "the doubt was followed"
        replayed = self.replay.parameter.detach()
        none = torch.zeros_like(self._travelled)
        # A step rounds a parameter twice: its decay, and the update. Each time it loses half a unit at most.
        largest = torch.finfo(replayed.dtype).eps * self._travelled
        return Doubt(none if self._spread is None else self._spread.size, replayed.double(), largest)

    def result(self) -> Replayed:
        """Return where the parameter and its shares have come to."""
        assert self._start is not None, "the shares were followed"
        shares = [share.weight for share in self._shares]
        parameter = self.replay.parameter.detach()
        rounding = None
        if self._rounding is not None:
            rounding = Rounding(self._rounding.weight, self._expected, parameter, self._repeatable)
        return Replayed(
            start=self._start.weight,
            shares=torch.stack(shares) if shares else self._start.weight.new_zeros(0, *self._start.weight.shape),
            rounding=rounding,
            parameter=parameter,
            state=self.replay.state,
            noise=4 * self._noise,  # a moment of gradients is smaller than they are
        )


def _lost(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the most that each element of rows (T, d) can have lost when they were stored in a coarser dtype.

    Half a unit in the last place; of float16, whose rows are scaled to their largest element, at least half of its
    smallest number beside that.
    """
    lost = torch.finfo(dtype).eps / 2 * rows.abs()
    if dtype == torch.float16 and rows.shape[1]:
        lost = lost.maximum(torch.finfo(dtype).smallest_normal * 2**-10 * rows.abs().amax(dim=1, keepdim=True))
    return lost


class _Reader:
    """The calls of any step that reach some parameters, a part at a time."""

    def __init__(
        self, run: PatternSource, names: Collection[str], codes: Codes, contributing: Collection[str] | None
    ) -> None:
        self._run = run
        self._codes = codes
        self._contributing = contributing
        self._layers = [n for n, entry in run.layers.items() if set(entry.parameters.values()) & set(names)]
        for layer in self._layers:
            run.require_values(layer)
        self._part: PatternPart | None = None
        self._sources: dict[str, tuple[Calls, Rows, Rows, npt.NDArray[np.int64] | None]] = {}

    def calls(self, step: int) -> list[_Call]:
        """Return a step's calls, in the order of layers and forward calls."""
        if self._part is None or not self._part.start <= step < self._part.stop:
            self._open(find_part(self._run, step))
        return [call for layer in self._sources for call in self._of(layer, step)]

    def _open(self, part: PatternPart) -> None:
        self._part = part
        self._sources = {}
        for layer in self._layers:
            if count := part.count(layer):
                counted = self._contributing is None or layer in self._contributing
                groups = self._codes(part, layer) if counted else np.full(count, -1)
                rows = (part.rows(layer, "keys"), part.rows(layer, "values"))
                self._sources[layer] = (part.calls(layer), *rows, groups)

    def _of(self, layer: str, step: int) -> Iterator[_Call]:
        table, keys, values, groups = self._sources[layer]
        entry = self._run.layer(layer)
        dtype: torch.dtype = getattr(torch, self._run.description.parameters[entry.uses[0].parameter].dtype)
        for i in range(*np.searchsorted(table["step"], [step, step + 1]).tolist()):
            at = slice(int(table["offset"][i]), int(table["offset"][i] + table["rows"][i] * table["positions"][i]))
            yield _Call(
                entry=entry,
                micro=int(table["micro"][i]),
                keys=decode(*keys.take(at), dtype),
                values=decode(*values.take(at), dtype),
                codes=None if groups is None else torch.from_numpy(np.ascontiguousarray(groups[at])),
                layout=table["layout"][i],
                whole=not sums_in_own_order(entry.kind)
                and all(rows.dtype in (dtype, torch.int64) for rows in (keys, values)),
                key_dtype=keys.dtype,
                value_dtype=values.dtype,
            )
