"""Contributions of single patterns where the optimizer has no coefficients: from the last step to the first.

One matrix multiplies all gradients of a step (`multipliers`), and what a pattern adds to one output unit is a
product with it that costs about what attention costs, once the steps are replayed. A layer's parameters may be of
different optimizer families.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualform.engine.block import Block
from dualform.engine.jobs import Sweep
from dualform.engine.measures import PatternMeasure
from dualform.engine.parameter_steps import ParameterSteps
from dualform.engine.reading import PatternRange, kept_by_part, read_rows
from dualform.engine.reducers import one_group
from dualform.engine.shares import replayed_parameters
from dualform.engine.source import PatternSource
from dualform.engine.stored_calls import StepReader
from dualform.identity.families.elementwise import ElementwiseMultiplier
from dualform.identity.families.optimizer_kind import Multiplier, StepMap
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
    like, horizon, layer = job.like, job.view.horizon, job.layer
    entry = source.require_values(layer)
    scalar = {
        use: source.coefficients(use.parameter, horizon)[0].step
        for use in entry.uses
        if not source.is_replayed(use.parameter)
    }
    factors = {use: source.facts(use.parameter)[1] for use in entry.uses}
    places = _step_places(source, job)
    for step, found in multipliers(source, layer, horizon=horizon):
        if step not in places:
            continue
        wanted, micros = places[step]
        by_use = {use: multiplier.to(like) for use, multiplier in found.items()}
        for use, coefficients in scalar.items():
            shape = source.description.parameters[use.parameter].shape
            matrix = torch.full(shape, float(coefficients[step]), dtype=torch.float64)
            by_use[use] = ElementwiseMultiplier(matrix).to(like)
        assert wanted.part is not None, "a step lies in a part"
        block = Block(
            patterns=wanted.rows + wanted.count_before,
            keys=read_rows(wanted.part.rows(layer, "keys"), wanted.rows, like.dtype, like.device),
            values=read_rows(wanted.part.rows(layer, "values"), wanted.rows, like.dtype, like.device),
        )
        yield _Step(
            wanted,
            block,
            by_use,
            {use: torch.from_numpy(each[step, micros]).to(like) for use, each in factors.items()},
        )


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
