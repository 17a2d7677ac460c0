"""Contributions of single patterns where the optimizer has no coefficients: one pass from the last step to the first.

A pattern of step s adds `e ⊙ (A_s (x ⊙ q))` to the output, with one matrix A_s per step (`store.replay.multipliers`).
For one output unit that is a dot product of its key with a query that was multiplied by a row of A_s, so the pass costs
about what attention costs, once the steps are replayed.
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
from dualform.store.reader import Shard
from dualform.store.replay import multipliers
from dualform.store.stream import Chunk, selected, take

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Step:
    """The kept patterns of one step: their chunk, their groups, and what multiplies their gradients, by role."""

    chunk: Chunk
    codes: Tensor  # (n,)
    matrices: dict[str, Tensor]  # role -> A_s in the parameter's shape, or a number
    factors: dict[str, Tensor]  # role -> (n,)


def score_backward(
    table: Table, layer: str, queries: Tensor, units: Tensor, grouping: Grouping | None, reducer: Reducer[R]
) -> R:
    """Score every kept pattern by its contribution to each query's unit (Q,), and reduce."""
    for step in _steps(table, layer, grouping, queries):
        assert step.chunk.values is not None, "values were asked for"
        total = torch.zeros(len(queries), len(step.codes), dtype=queries.dtype, device=queries.device)
        for role, matrix in step.matrices.items():
            if role == "bias":
                total += (matrix[units] if matrix.dim() else matrix.expand(len(units)))[:, None] * step.factors[role]
            else:
                rows = matrix[units] if matrix.dim() else matrix
                total += ((queries * rows) @ step.chunk.keys.T) * step.factors[role]
        reducer.update(step.chunk, total * step.chunk.values[:, units].T, step.codes)
    return reducer.result()


def contribute_backward(table: Table, layer: str, queries: Tensor) -> Tensor:
    """Return what every kept pattern adds to every output, (Q, T, d_out), in the order of the patterns."""
    parts: list[tuple[int, Tensor]] = []
    for step in _steps(table, layer, None, queries):
        assert step.chunk.values is not None, "values were asked for"
        keys, values = step.chunk.keys, step.chunk.values
        total = torch.zeros(len(queries), *values.shape, dtype=queries.dtype, device=queries.device)
        for role, matrix in step.matrices.items():
            if role == "bias":
                total += (matrix * values) * step.factors[role][:, None]
            else:
                full = matrix if matrix.dim() else matrix.expand(values.shape[1], keys.shape[1])
                seen = torch.einsum("qi,ni,oi->qno", queries, keys, full)
                total += seen * values * step.factors[role][:, None]
        parts.append((int(step.chunk.patterns[0]), total))
    return torch.cat([part for _, part in sorted(parts, key=lambda part: part[0])], dim=1)


def _steps(table: Table, layer: str, grouping: Grouping | None, like: Tensor) -> Iterator[_Step]:
    run, horizon = table.run, table.horizon
    entry = run.require_values(layer)
    scalar = {
        role: run.coefficients(p, horizon)[0].step for role, p in entry.parameters.items() if not run.is_replayed(p)
    }
    factors = {role: run.facts(parameter)[1] for role, parameter in entry.parameters.items()}
    places = _places(table, layer)
    for step, matrices in multipliers(run, layer, horizon=horizon):
        if step not in places:
            continue
        shard, rows, number, taken, micros = places[step]
        by_role = {
            role: matrix.flatten(1).to(like) if matrix.dim() > 1 else matrix.to(like)
            for role, matrix in matrices.items()
        }
        by_role |= {role: torch.tensor(found[step]).to(like) for role, found in scalar.items()}
        chunk = Chunk(
            patterns=rows + number,
            keys=take(shard.rows(layer, "keys"), rows, like.dtype, like.device),
            values=take(shard.rows(layer, "values"), rows, like.dtype, like.device),
        )
        codes = np.zeros(len(rows), dtype=np.int64) if grouping is None else grouping.codes[taken : taken + len(rows)]
        yield _Step(
            chunk=chunk,
            codes=torch.from_numpy(codes).to(like.device),
            matrices=by_role,
            factors={role: torch.from_numpy(found[step, micros]).to(like) for role, found in factors.items()},
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
