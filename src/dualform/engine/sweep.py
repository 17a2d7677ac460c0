"""Contributions of single patterns where the optimizer has no coefficients: from the last step to the first.

One matrix multiplies all gradients of a step (`multipliers`), and what a pattern adds to one output unit is a
product with it that costs about what attention costs, once the steps are replayed. A layer's parameters may be of
different optimizer families.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualform.engine.block import Block
from dualform.engine.jobs import Fold, Sweep
from dualform.engine.measures import PatternMeasure
from dualform.engine.parameter_steps import Following, GroupsByPart, ParameterSteps, RetakenStep, optimizer_of
from dualform.engine.reading import PatternRange, kept_by_part, read_rows
from dualform.engine.reducers import one_group
from dualform.engine.shares import replayed_parameters
from dualform.engine.source import PatternSource
from dualform.engine.stored_calls import StepReader
from dualform.identity.families.elementwise_recursions import ElementwiseMultiplier
from dualform.identity.families.optimizer_kind import AskedOutputs, AskedRecursion, Multiplier, StepMap
from dualform.identity.families.optimizer_replay import OptimizerReplay
from dualform.identity.parameter_use import ParameterUse


@dataclass(frozen=True, slots=True)
class _Step:
    """The kept patterns of one step, and what multiplies their gradients."""

    wanted: PatternRange
    block: Block
    multipliers: dict[ParameterUse, Multiplier]
    factors: dict[ParameterUse, Tensor]  # (n,) each


def run_sweep(source: PatternSource, job: Sweep[Any]) -> Any:
    """Return the result of a sweep."""
    state = job.new_state()
    for _, block, measures, groups_of in sweep_blocks(source, [job]):
        state = job.reducer.add(state, block, measures, groups_of)
    return job.reducer.result(state)


def sweep_blocks(source: PatternSource, jobs: Sequence[Sweep[Any]]) -> Iterator[tuple[int, Block, Tensor, Tensor]]:
    """Yield, from the last step to the first, for each sweep its place, and kept patterns with measures and groups.

    The sweeps are of one layer, view, device and dtype: the steps are taken again once for all of them.
    """
    for step in _steps(source, jobs[0]):
        for place, job in enumerate(jobs):
            yield place, step.block, _contribution(step, job), _groups_of(step, job)


def _groups_of(step: _Step, job: Sweep[Any]) -> Tensor:
    """Return the group of each of a step's patterns, (n,)."""
    device = job.like.device
    return one_group(len(step.wanted), device) if job.groups is None else job.groups.of(step.wanted, device)


def _contribution(step: _Step, job: Sweep[Any]) -> Tensor:
    """Return each pattern's contribution to one unit of each query, (Q, n)."""
    queries, measure = job.queries, job.measure
    assert queries is not None, "a contribution is one to a query"
    assert isinstance(measure, PatternMeasure), "a sweep measures contributions"
    assert measure.units is not None, "to one output unit"
    assert step.block.values is not None, "this pass reads values"
    keys, values = step.block.keys, step.block.values
    total = torch.zeros(len(queries), len(keys), dtype=values.dtype, device=queries.device)
    for use, multiplier in step.multipliers.items():
        total += multiplier.contribute(use.parameter_map, queries, keys, values, measure.units) * step.factors[use]
    return total


def _steps(source: PatternSource, job: Sweep[Any]) -> Iterator[_Step]:
    reader = _SweptSteps(source, job)
    for step, found in multipliers(source, job.layer, horizon=job.view.horizon):
        if (swept := reader.read(step, found)) is not None:
            yield swept


class _SweptSteps:
    """Reads the kept patterns of any step of a sweep."""

    def __init__(self, source: PatternSource, job: Sweep[Any]) -> None:
        entry = source.require_values(job.layer)
        self._source = source
        self._job = job
        self._scalar = {
            use: source.coefficients(use.parameter, job.view.horizon)[0].step
            for use in entry.uses
            if not source.is_replayed(use.parameter)
        }
        self._factors = {use: source.facts(use.parameter)[1] for use in entry.uses}
        self._places = _step_places(source, job)

    def read(self, step: int, found: Mapping[ParameterUse, Multiplier]) -> _Step | None:
        """Return a step's kept patterns, given what multiplies their gradients; None where none is kept."""
        if step not in self._places:
            return None
        like, layer = self._job.like, self._job.layer
        wanted, micros = self._places[step]
        by_use = {use: multiplier.to(like) for use, multiplier in found.items()}
        for use, coefficients in self._scalar.items():
            shape = self._source.description.parameters[use.parameter].shape
            matrix = torch.full(shape, float(coefficients[step]), dtype=torch.float64)
            by_use[use] = ElementwiseMultiplier(matrix).to(like)
        assert wanted.part is not None, "a step lies in a part"
        block = Block(
            patterns=wanted.rows + wanted.count_before,
            keys=read_rows(wanted.part.rows(layer, "keys"), wanted.rows, like.dtype, like.device),
            values=read_rows(wanted.part.rows(layer, "values"), wanted.rows, like.dtype, like.device),
        )
        factors = {use: torch.from_numpy(each[step, micros]).to(like) for use, each in self._factors.items()}
        return _Step(wanted, block, by_use, factors)


class ForwardSweep:
    """A sweep that goes forwards twice, for patterns that cannot be seen from the last step to the first.

    The first time, `folds` keep of each step's map only what acts on the asked outputs; `begin` then runs the recursion
    backwards over that. The second time, `take` measures each step's patterns by the multipliers that were found.
    """

    def __init__(self, source: PatternSource, job: Sweep[Any]) -> None:
        assert job.queries is not None, "a contribution is one to a query"
        assert isinstance(job.measure, PatternMeasure), "a sweep measures contributions"
        assert job.measure.units is not None, "to one output unit"
        entry = source.require_values(job.layer)
        queries, units = job.queries.cpu(), job.measure.units.cpu()
        self._job = job
        self._horizon = min(job.view.horizon, source.steps)
        self._recursions: dict[ParameterUse, AskedRecursion[Any]] = {
            use: optimizer_of(source, use.parameter).backward_of(
                AskedOutputs(use.parameter_map, queries, units, entry.d_out, tuple(source.initial[use.parameter].shape))
            )
            for use in entry.uses
            if source.is_replayed(use.parameter)
        }
        self._multipliers: dict[int, dict[ParameterUse, Multiplier]] = {}
        self._reader = _SweptSteps(source, job)
        self._state = job.new_state()

    @property
    def kept_bytes(self) -> int:
        """Size of what is kept of all steps between the two times, at most."""
        return self._horizon * sum(recursion.bytes_per_step for recursion in self._recursions.values())

    def folds(self) -> list[Fold[list[tuple[int, StepMap]]]]:
        """Return the jobs of the first time, one for each use of a parameter."""
        return [
            Fold((use.parameter,), self._horizon, _KeepAsked(recursion)) for use, recursion in self._recursions.items()
        ]

    def begin(self, kept: Sequence[Mapping[str, list[tuple[int, StepMap]]]]) -> None:
        """Take the results of `folds`, and find what multiplies the gradients of each step."""
        for (use, recursion), by_name in zip(self._recursions.items(), kept, strict=True):
            maps = by_name[use.parameter]
            while maps:
                step, linear = maps.pop()
                self._multipliers.setdefault(step, {})[use] = recursion.step(linear)

    def take(self, step: int) -> None:
        """Measure the patterns of a step; the steps come in their order."""
        if step < self._horizon and (swept := self._reader.read(step, self._multipliers.pop(step, {}))) is not None:
            measures, groups_of = _contribution(swept, self._job), _groups_of(swept, self._job)
            self._state = self._job.reducer.add(self._state, swept.block, measures, groups_of)

    def result(self) -> Any:
        """Return the answer."""
        return self._job.reducer.result(self._state)


@dataclass(frozen=True, slots=True)
class _KeepAsked:
    """Keeps of each step's map what acts on the asked outputs, with the number of the step."""

    recursion: AskedRecursion[Any]

    def start(self, replay: OptimizerReplay, groups: GroupsByPart | None) -> "_KeepingAsked":
        return _KeepingAsked(self.recursion)


class _KeepingAsked(Following[list[tuple[int, StepMap]]]):
    def __init__(self, recursion: AskedRecursion[Any]) -> None:
        self._recursion = recursion
        self._kept: list[tuple[int, StepMap]] = []

    def after_step(self, taken: RetakenStep) -> None:
        self._kept.append((taken.step, self._recursion.keep(taken.linear)))

    def result(self) -> list[tuple[int, StepMap]]:
        return self._kept


def _step_places(source: PatternSource, job: Sweep[Any]) -> dict[int, tuple[PatternRange, npt.NDArray[np.int64]]]:
    """Return each step's kept patterns, and their micros."""
    places = {}
    view = job.view
    for part, rows, before, kept_before in kept_by_part(source, job.layer, horizon=view.horizon, mask=view.mask):
        address = part.addresses(job.layer)
        steps = address["step"][rows]
        for step in np.unique(steps).tolist():
            first, last = np.searchsorted(steps, [step, step + 1]).tolist()
            mine = rows[first:last]
            places[step] = (PatternRange(part, mine, kept_before + first, before), address["micro"][mine])
    return places


def multipliers(
    source: PatternSource, layer: str, *, horizon: int
) -> Iterator[tuple[int, dict[ParameterUse, Multiplier]]]:
    """Yield, for each step from the last to the first, what multiplies its gradients in each of a layer's parameters.

    A multiplier depends on all later steps, so it is found backward, from segments of about sqrt(S) steps that are
    replayed once more; that many matrices are held, never S.
    """
    names = replayed_parameters(source, [layer])
    reader = StepReader(source, names)
    steps = min(horizon, source.steps)
    length = max(1, math.isqrt(steps))
    parameters = {name: ParameterSteps(source, name) for name in names}
    saved: list[dict[str, OptimizerReplay]] = []
    for step in range(steps):
        if step % length == 0:
            saved.append({name: parameter.replay.copy() for name, parameter in parameters.items()})
        calls = reader.calls(step)
        for parameter in parameters.values():
            parameter.take(step, calls)
    backward = {name: p.replay.kind.backward(source.initial[name].shape) for name, p in parameters.items()}
    for segment in reversed(range(len(saved))):
        maps: list[dict[str, StepMap]] = []
        for name, parameter in parameters.items():
            parameter.replay = saved[segment][name]
        for step in range(segment * length, min((segment + 1) * length, steps)):
            calls = reader.calls(step)
            taken = {name: parameter.take(step, calls) for name, parameter in parameters.items()}
            maps.append({name: one.linear for name, one in taken.items() if one is not None})
        for step in reversed(range(segment * length, segment * length + len(maps))):
            by_name = {name: backward[name].step(linear) for name, linear in maps.pop().items()}
            uses = source.layer(layer).uses
            yield step, {use: by_name[use.parameter] for use in uses if use.parameter in by_name}
