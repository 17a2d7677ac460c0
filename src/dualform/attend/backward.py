"""Contributions of single patterns where the optimizer has no coefficients: one pass from the last step to the first.

What multiplies the gradients of a step is one matrix (`store.replay.multipliers`), and what a pattern adds to one
output unit is a product with it that costs about what attention costs, once the steps are replayed. A layer's
parameters may be of different families.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualform.attend.groups import Grouping, Table
from dualform.attend.reducers import Reducer
from dualform.coefficients.elementwise import Entrywise
from dualform.coefficients.replayed import Multiplier
from dualform.identity.parameter_use import ParameterUse
from dualform.store.reader import Shard
from dualform.store.replay import multipliers
from dualform.store.stream import Chunk, selected, take

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Step:
    """The kept patterns of one step: their chunk, their groups, and what multiplies their gradients, by use."""

    chunk: Chunk
    codes: Tensor  # (n,)
    multipliers: dict[ParameterUse, Multiplier]
    factors: dict[ParameterUse, Tensor]  # (n,) each


def score_backward(
    table: Table,
    layer: str,
    queries: Tensor,
    units: Tensor,
    grouping: Grouping | None,
    reducer: Reducer[R],
    *,
    dtype: torch.dtype,
) -> R:
    """Score every kept pattern by its contribution to each query's unit (Q,), and reduce."""
    for step in _steps(table, layer, grouping, queries.device, dtype):
        reducer.update(step.chunk, _contribution(step, queries, units), step.codes)
    return reducer.result()


def contribute_backward(table: Table, layer: str, queries: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what every kept pattern adds to every output, (Q, T, d_out), in the order of the patterns."""
    parts: list[tuple[int, Tensor]] = []
    for step in _steps(table, layer, None, queries.device, dtype):
        units = range(table.run.layer(layer).d_out)
        each = [_contribution(step, queries, torch.full((len(queries),), u, device=queries.device)) for u in units]
        parts.append((int(step.chunk.patterns[0]), torch.stack(each, dim=2)))
    return torch.cat([part for _, part in sorted(parts, key=lambda part: part[0])], dim=1)


def _contribution(step: _Step, queries: Tensor, units: Tensor) -> Tensor:
    """Return each pattern's contribution to one unit of each query, (Q, n)."""
    assert step.chunk.values is not None, "values were asked for"
    keys, values = step.chunk.keys, step.chunk.values
    total = torch.zeros(len(queries), len(keys), dtype=values.dtype, device=queries.device)
    for use, multiplier in step.multipliers.items():
        total += multiplier.contribute(use.parameter_map, queries, keys, values, units) * step.factors[use]
    return total


def _steps(
    table: Table, layer: str, grouping: Grouping | None, device: torch.device, dtype: torch.dtype
) -> Iterator[_Step]:
    like = torch.empty(0, dtype=dtype, device=device)
    run, horizon = table.run, table.horizon
    entry = run.require_values(layer)
    scalar = {
        use: run.coefficients(use.parameter, horizon)[0].step
        for use in entry.uses
        if not run.is_replayed(use.parameter)
    }
    factors = {use: run.facts(use.parameter)[1] for use in entry.uses}
    places = _places(table, layer)
    for step, found in multipliers(run, layer, horizon=horizon):
        if step not in places:
            continue
        shard, rows, number, taken, micros = places[step]
        by_use = {use: multiplier.to(like) for use, multiplier in found.items()}
        for use, coefficients in scalar.items():
            shape = run.manifest.parameters[use.parameter].shape
            by_use[use] = Entrywise(torch.full(shape, float(coefficients[step]), dtype=torch.float64)).to(like)
        chunk = Chunk(
            patterns=rows + number,
            keys=take(shard.rows(layer, "keys"), rows, like.dtype, like.device),
            values=take(shard.rows(layer, "values"), rows, like.dtype, like.device),
        )
        codes = np.zeros(len(rows), dtype=np.int64) if grouping is None else grouping.codes[taken : taken + len(rows)]
        yield _Step(
            chunk=chunk,
            codes=torch.from_numpy(codes).to(like.device),
            multipliers=by_use,
            factors={use: torch.from_numpy(each[step, micros]).to(like) for use, each in factors.items()},
        )


def _places(
    table: Table, layer: str
) -> dict[int, tuple[Shard, npt.NDArray[np.int64], int, int, npt.NDArray[np.int64]]]:
    """Return each step's shard and kept rows, the number of the shard's first pattern, how many came before, micros."""
    places = {}
    number = taken = 0
    for shard in table.run.shards:
        rows = selected(shard, layer, table.horizon, table.keep())
        address = shard.addresses(layer)
        steps = address["step"][rows]
        for step in np.unique(steps).tolist():
            first, last = np.searchsorted(steps, [step, step + 1]).tolist()
            mine = rows[first:last]
            places[step] = (shard, mine, number, taken + first, address["micro"][mine])
        number += shard.count(layer)
        taken += len(rows)
    return places
