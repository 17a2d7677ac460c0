"""Contributions of single patterns where the optimizer has no coefficients: from the last step to the first.

One matrix multiplies all gradients of a step (`replay.multipliers`), and what a pattern adds to one output unit is a
product with it that costs about what attention costs, once the steps are replayed. A layer's parameters may be of
different optimizer families.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualform.engine.block import Block
from dualform.engine.jobs import Sweep
from dualform.engine.measures import PatternMeasure
from dualform.engine.reading import PatternRange, kept_by_part, read_rows
from dualform.engine.reducers import one_group
from dualform.engine.replay import multipliers
from dualform.engine.source import PatternSource
from dualform.identity.families.elementwise import ElementwiseMultiplier
from dualform.identity.families.kind import Multiplier
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
    for block, measures, groups_of in sweep_blocks(source, job):
        state = job.reducer.add(state, block, measures, groups_of)
    return job.reducer.result(state)


def sweep_blocks(source: PatternSource, job: Sweep[Any]) -> Iterator[tuple[Block, Tensor, Tensor]]:
    """Yield the kept patterns of each step, from the last step to the first, their measures and their groups."""
    assert job.queries is not None, "a contribution is one to a query"
    assert isinstance(job.measure, PatternMeasure), "a sweep measures contributions"
    assert job.measure.units is not None, "to one output unit"
    device = job.like.device
    for step in _steps(source, job):
        measures = _contribution(step, job.queries, job.measure.units)
        groups_of = one_group(len(step.wanted), device) if job.groups is None else job.groups.of(step.wanted, device)
        yield step.block, measures, groups_of


def _contribution(step: _Step, queries: Tensor, units: Tensor) -> Tensor:
    """Return each pattern's contribution to one unit of each query, (Q, n)."""
    assert step.block.values is not None, "values were asked for"
    keys, values = step.block.keys, step.block.values
    total = torch.zeros(len(queries), len(keys), dtype=values.dtype, device=queries.device)
    for use, multiplier in step.multipliers.items():
        total += multiplier.contribute(use.parameter_map, queries, keys, values, units) * step.factors[use]
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
    places = _places(source, job)
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


def _places(source: PatternSource, job: Sweep[Any]) -> dict[int, tuple[PatternRange, npt.NDArray[np.int64]]]:
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
