"""The streaming pass: every chunk of a layer's patterns, scored against the queries, into a reducer.

Memory is bounded by the chunk and by what the reducer holds. Shortcuts live with the questions (`spotlight.py`); this
is the plain pass that they are compared with.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualform.algebra import attend, scale
from dualform.attend.groups import Grouping, Numbered, Table
from dualform.attend.reducers import Reducer
from dualform.forms import form
from dualform.progress import bar
from dualform.store.stream import CHUNK, Chunk, stream

R = TypeVar("R")
Of = Literal["attention", "magnitude", "contribution", "effect"]
SCORES = 1 << 24  # elements of a chunk's score matrix at most
KEYS = 1 << 19  # elements of a chunk's keys at most, on a CPU: larger ones leave its cache, and are much slower


@dataclass(frozen=True, slots=True)
class Score:
    """What a pattern is scored by, for each query. Effects have a score of their own, in `effects.py`.

    Attributes:
        of: attention x·q; magnitude |x·q|; or contribution, what the pattern adds to an output unit.
        units: (Q,) the output unit of each query, for contributions. Without units the score of a contribution is only
            what multiplies the pattern's value.
    """

    of: Of
    units: Tensor | None = None
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)  # of the layer's parameters, by role

    @property
    def needs_values(self) -> bool:
        """Whether values and coefficients have to be read."""
        return self.of == "contribution"

    def __call__(self, queries: Tensor, chunk: Chunk) -> Tensor:
        """Return the scores, (Q, n)."""
        if self.of == "contribution":
            return self._contribution(queries, chunk)
        attention = attend(queries, chunk.keys)
        if chunk.scales is not None:
            attention *= chunk.scales
        return attention if self.of == "attention" else attention.abs_()

    def _contribution(self, queries: Tensor, chunk: Chunk) -> Tensor:
        assert chunk.values is not None, "contributions need values"
        if chunk.coefficients.keys() <= {"weight", "bias"}:
            weight = chunk.coefficients.get("weight", torch.zeros_like(chunk.keys[:, 0]))
            scaled = scale(attend(queries, chunk.keys), weight, chunk.coefficients.get("bias"))
            return scaled if self.units is None else scaled * chunk.values[:, self.units].T
        assert self.units is not None, "only a linear layer's values are multiplied by one number"
        total = torch.zeros(len(queries), len(chunk.keys), dtype=chunk.values.dtype, device=queries.device)
        for role, coefficients in chunk.coefficients.items():
            ones = torch.ones(self.shapes[role], dtype=chunk.values.dtype, device=queries.device)
            total += form(role).meet(queries, chunk.keys, self.units, ones) * coefficients
        return total * chunk.values[:, self.units].T


class Scores(Protocol):
    """Anything that scores a chunk."""

    @property
    def needs_values(self) -> bool:
        """Whether values and coefficients have to be read."""

    def __call__(self, queries: Tensor, chunk: Chunk) -> Tensor:
        """Return the scores, a row per query or input, (Q, n)."""


def score_patterns(
    table: Table,
    layer: str,
    queries: Tensor,
    score: Scores,
    grouping: Grouping | Numbered | None,
    reducer: Reducer[R],
    *,
    chunk_size: int | None = None,
) -> R:
    """Score every kept pattern of a layer against the queries, (Q, d_in), and reduce."""
    size = chunk_size or _chunk_size(queries)
    values = score.needs_values
    for chunk, codes in _chunks(table, layer, grouping, values=values, size=size, like=queries, scaled=values):
        reducer.update(chunk, score(queries, chunk), codes)
    return reducer.result()


def _chunk_size(queries: Tensor) -> int:
    """Return how many patterns to score at once: no more than memory allows, and on a CPU no more than its cache."""
    count, width = queries.shape
    most = CHUNK if queries.device.type != "cpu" else min(CHUNK, KEYS // max(width, 1))
    return max(256, min(most, SCORES // max(count, 1)))


def sum_patterns(
    table: Table,
    layer: str,
    grouping: Grouping | None,
    reducer: Reducer[R],
    *,
    values: bool,
    like: Tensor,
) -> R:
    """Reduce every kept pattern of a layer without any query."""
    nothing = like.new_zeros(0)
    for chunk, codes in _chunks(table, layer, grouping, values=values, size=CHUNK, like=like, scaled=True):
        reducer.update(chunk, nothing, codes)
    return reducer.result()


def _chunks(
    table: Table,
    layer: str,
    grouping: Grouping | Numbered | None,
    *,
    values: bool,
    size: int,
    like: Tensor,
    scaled: bool,
) -> Iterator[tuple[Chunk, Tensor]]:
    """Yield the kept patterns of a layer in chunks, each with its patterns' groups (n,).

    With `scaled=False` row-scaled keys still lack their scales, which saves a pass over them.
    """
    codes = _codes(table, layer, grouping)
    chunks = stream(
        table.run,
        layer,
        horizon=table.horizon,
        keep=table.keep(),
        values=values,
        size=size,
        device=like.device,
        dtype=like.dtype if like.is_floating_point() else None,
        scaled=scaled,
    )
    with bar(f"attending {layer}", total=table.run.count(layer)) as advance:
        for chunk in chunks:
            count = len(chunk.patterns)
            yield chunk, torch.from_numpy(codes(count)).to(like.device)
            advance(count)


def _codes(table: Table, layer: str, grouping: Grouping | Numbered | None) -> Callable[[int], npt.NDArray[np.int64]]:
    """Return what gives the groups of the next so many patterns."""
    if grouping is None:
        return lambda count: np.zeros(count, dtype=np.int64)
    pieces = iter([grouping.codes]) if isinstance(grouping, Grouping) else table.numbers(layer, grouping)
    waiting = np.zeros(0, dtype=np.int64)

    def take(count: int) -> npt.NDArray[np.int64]:
        nonlocal waiting
        while len(waiting) < count:
            waiting = np.concatenate([waiting, next(pieces)])
        taken, waiting = waiting[:count], waiting[count:]
        return taken

    return take
