"""The streaming pass: every chunk of a layer's patterns, scored against the queries, into a reducer.

Memory is bounded by the chunk and by what the reducer holds. Shortcuts live with the questions (`spotlight.py`); this
is the plain pass that they are compared with.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualform.algebra import FEW, attend, scale
from dualform.attend.groups import Grouping, Numbered, Table
from dualform.attend.reducers import Reducer, one_group
from dualform.identity.parameter_use import ParameterUse, matrix_and_bias
from dualform.progress import bar
from dualform.store.reader import Shard
from dualform.store.stream import CHUNK, Chunk, Piece, Reader, long_pieces, pieces, pool_pieces, resident_keys
from dualform.threads import side_by_side

R = TypeVar("R")
Of = Literal["attention", "magnitude", "contribution", "effect"]
SCORES = 1 << 24  # elements of a chunk's score matrix at most
SCORES_THERE = 1 << 26  # and on a GPU
LEAST_THERE = 1 << 14  # patterns of a chunk there: it costs many a launch
LONGEST = 1 << 16  # patterns of a chunk at most that is read from files
STEP = 256
KEYS = 1 << 21  # elements of a chunk's keys at most, on a CPU: larger ones leave its cache, and are slower
READ_ONCE = 32  # queries at most that read every key about once, whether it stays in the cache or not


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
    shapes: Mapping[ParameterUse, Sequence[int]] = field(default_factory=dict)  # of the layer's parameters

    @property
    def needs_values(self) -> bool:
        """Whether values and coefficients have to be read."""
        return self.of == "contribution"

    def __call__(self, queries: Tensor, chunk: Chunk, out: Tensor | None = None) -> Tensor:
        """Return the scores, (Q, n), in memory that may be used where it is given."""
        if self.of == "contribution":
            return self._contribution(queries, chunk)
        attention = attend(queries, chunk.keys, out)
        if chunk.scales is not None:
            attention *= chunk.scales
        return attention if self.of == "attention" else attention.abs_()

    def _contribution(self, queries: Tensor, chunk: Chunk) -> Tensor:
        assert chunk.values is not None, "contributions need values"
        plain = matrix_and_bias(chunk.coefficients)
        if plain is not None:
            of_matrix, of_bias = (None if use is None else chunk.coefficients[use] for use in plain)
            of_matrix = torch.zeros_like(chunk.keys[:, 0]) if of_matrix is None else of_matrix
            scaled = scale(attend(queries, chunk.keys), of_matrix, of_bias)
            return scaled if self.units is None else scaled * chunk.values[:, self.units].T
        assert self.units is not None, "only a linear layer's values are multiplied by one number"
        total = torch.zeros(len(queries), len(chunk.keys), dtype=chunk.values.dtype, device=queries.device)
        for use, coefficients in chunk.coefficients.items():
            ones = torch.ones(self.shapes[use], dtype=chunk.values.dtype, device=queries.device)
            total += use.parameter_map.unit_factors(queries, chunk.keys, self.units, ones) * coefficients
        return total * chunk.values[:, self.units].T


class Scores(Protocol):
    """Anything that scores a chunk."""

    @property
    def needs_values(self) -> bool:
        """Whether values and coefficients have to be read."""

    def __call__(self, queries: Tensor, chunk: Chunk, out: Tensor | None = None) -> Tensor:
        """Return the scores, a row per query or input, (Q, n), in memory that may be used where it is given."""


def score_patterns(
    table: Table,
    layer: str,
    queries: Tensor,
    score: Scores,
    grouping: Grouping | Numbered | None,
    reducer: Reducer[R],
    *,
    chunk_size: int | None = None,
    numbers: npt.NDArray[np.int64] | None = None,
) -> R:
    """Score every kept pattern of a layer against the queries, (Q, d_in), and reduce.

    With numbers, keys of the layer's pool are scored, which patterns refer to.
    """
    size = chunk_size or _chunk_size(queries)
    values = score.needs_values
    source = _Source(table, layer, grouping, values=values, size=size, like=queries, scaled=values)
    buffers = threading.local()

    def scores(chunk: Chunk) -> Tensor:
        if queries.device.type != "cpu":
            return score(queries, chunk)
        if not hasattr(buffers, "scores"):  # memory that is new to the process costs as much as filling it
            buffers.scores = torch.empty(size * len(queries), dtype=chunk.keys.dtype)
        return score(queries, chunk, buffers.scores)

    source.reduce(reducer, scores, numbers)
    return reducer.result()


def _chunk_size(queries: Tensor) -> int:
    """Return how many patterns to score at once: no more than memory allows, and on a CPU no more than its cache.

    Products with a number of keys that is no multiple of a few hundred are up to a third slower.
    """
    count, width = queries.shape
    if queries.device.type != "cpu":
        return max(LEAST_THERE, SCORES_THERE // max(count, 1) // STEP * STEP)
    times = 1 if count > READ_ONCE else 2 if count > FEW else 4
    most = min(times * CHUNK, times * KEYS // max(width, 1))
    size = min(most, SCORES // max(count, 1))
    return max(STEP, size // STEP * STEP)


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
    source = _Source(table, layer, grouping, values=values, size=CHUNK, like=like, scaled=True)
    source.reduce(reducer, lambda chunk: nothing)
    return reducer.result()


class _Source:
    """The kept patterns of a layer in chunks, each with its patterns' groups (n,).

    With `scaled=False` row-scaled keys still lack their scales, which saves a pass over them.
    """

    def __init__(
        self,
        table: Table,
        layer: str,
        grouping: Grouping | Numbered | None,
        *,
        values: bool,
        size: int,
        like: Tensor,
        scaled: bool,
    ) -> None:
        dtype = like.dtype if like.is_floating_point() else None
        self._there = None if values else resident_keys(table.run, layer, like.device, dtype)
        self._table = table
        self._layer = layer
        self._grouping = grouping
        self._size = size if self._there is not None else min(size, LONGEST)
        self._device = like.device
        self._reader: Reader | None = None
        if self._there is None:
            self._reader = Reader(
                table.run, layer, horizon=table.horizon, values=values, device=like.device, dtype=dtype, scaled=scaled
            )
        self._buffers = threading.local()
        self._numbers: dict[int, npt.NDArray[np.int64]] = {}  # of the shards that are being read

    def reduce(
        self,
        reducer: Reducer[Any],
        score: Callable[[Chunk], Tensor],
        pooled: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Give every chunk to a reducer, with its scores; or of the keys of the pool with these numbers.

        On a CPU several threads read, score and prepare, each a chunk of its own; the reducer takes what was prepared
        in order, one at a time.
        """
        table, layer = self._table, self._layer
        if pooled is not None:
            found = list(pool_pieces(table.run, layer, pooled, size=self._size))
        elif self._there is None or isinstance(self._grouping, Numbered):
            found = list(pieces(table.run, layer, horizon=table.horizon, keep=table.keep(), size=self._size))
        else:
            found = list(long_pieces(table.kept(layer), size=self._size))
        total = table.count(layer) if pooled is None else len(pooled)
        with bar(f"attending {layer}", total=total) as advance:

            def prepare(piece: Piece) -> tuple[Any, int]:
                chunk = self._chunk(piece)
                return reducer.prepare(chunk, score(chunk), self._codes(piece)), len(piece)

            def take(prepared: tuple[Any, int]) -> None:
                reducer.take(prepared[0])
                advance(prepared[1])

            if self._device.type == "cpu" and not reducer.wide:
                side_by_side(found, prepare, take)
            else:
                for piece in found:
                    take(prepare(piece))

    def _chunk(self, piece: Piece) -> Chunk:
        if self._reader is not None:
            return self._reader.read(piece, self._buffer())
        assert self._there is not None, "keys are read, or there already"
        numbers = piece.rows + piece.before if piece.before else piece.rows
        first, last = int(numbers[0]), int(numbers[-1])
        if last - first + 1 == len(numbers):
            return Chunk(numbers, self._there[first : last + 1])
        return Chunk(numbers, self._there[torch.from_numpy(numbers).to(self._device)])

    def _buffer(self) -> Tensor | None:
        """Return the calling thread's memory for keys; what lies in it is done with when the next chunk is read."""
        if self._device.type != "cpu":
            return None
        if not hasattr(self._buffers, "keys"):
            width = self._table.run.layer(self._layer).d_in
            self._buffers.keys = torch.empty(8 * self._size * width, dtype=torch.uint8)
        buffer: Tensor = self._buffers.keys
        return buffer

    def _codes(self, piece: Piece) -> Tensor:
        grouping = self._grouping
        if grouping is None:
            return one_group(len(piece), self._device)
        if isinstance(grouping, Grouping):
            start = piece.kept + piece.start
            return grouping.on(self._device)[start : start + len(piece)]
        assert piece.shard is not None, "numbers are read shard by shard"
        found = self._of_shard(piece.shard, grouping)[piece.start : piece.start + len(piece)]
        return torch.from_numpy(found).to(self._device)

    def _of_shard(self, shard: Shard, groups: Numbered) -> npt.NDArray[np.int64]:
        numbers = self._numbers.get(shard.entry.index)
        if numbers is None:
            numbers = self._table.numbers_of(shard, self._layer, groups)
            self._numbers = {shard.entry.index: numbers, **dict(list(self._numbers.items())[:1])}
        return numbers
