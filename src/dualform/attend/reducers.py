"""What a streaming pass can add up: one small class per question.

A reducer takes chunks in any order and number: first it prepares what it can from a chunk alone, which threads do side
by side, then it takes that in. `merge` joins two reducers of different patterns, and is associative, so a pass may be
split. Shapes: Q queries, n patterns of a chunk, G groups.
"""

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualform.attend.distinct import Distinct
from dualform.identity.parameter_use import ParameterUse
from dualform.store.rebuild import scaled
from dualform.store.stream import Chunk

R = TypeVar("R")
FEW = 64  # groups that are summed by a product with their members
BLOCK = 1024  # keys whose sum is taken in their own dtype
LONG = 1 << 19  # scores of a query that are summed in theirs


def members(codes: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Return which pattern is in which group, as ones in a matrix, (n, G)."""
    found = torch.zeros(groups, len(codes), dtype=dtype, device=codes.device)
    return found.scatter_(0, codes[None], 1).T  # products with this layout are twice as fast


def one_group(count: int, device: torch.device) -> Tensor:
    """Return the groups of patterns that are all in one, (n,)."""
    return _zero(device).expand(count)


@functools.cache
def _zero(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.int64, device=device)


class Reducer(ABC, Generic[R]):
    """Takes chunks, gives a result."""

    wide = False  # whether taking a chunk is work for all threads, so that chunks are not prepared side by side

    def prepare(self, chunk: Chunk, scores: Tensor, codes: Tensor) -> Any:
        """Make of a chunk, its scores (Q, n) and its patterns' groups (n,) what `take` needs: here just that.

        In memory scores may lie pattern by pattern; here they are put in order. Several threads may do so at once. What
        is prepared is taken before the same thread reads another chunk.
        """
        return chunk, scores.contiguous(), codes

    @abstractmethod
    def take(self, prepared: Any) -> None:
        """Add what was prepared of a chunk, one at a time."""

    def of_distinct(self, distinct: Distinct, codes: Tensor) -> "Reducer[R] | None":
        """Return what makes the same of the scores of distinct keys, given each pattern's group (T,); if anything."""
        return None

    def update(self, chunk: Chunk, scores: Tensor, codes: Tensor) -> None:
        """Take a chunk with its scores (Q, n) and its patterns' groups (n,)."""
        self.take(self.prepare(chunk, scores, codes))

    @abstractmethod
    def merge(self, other: Self) -> Self:
        """Return the reducer of both parts' patterns."""

    @abstractmethod
    def result(self) -> R:
        """Return what was added up."""


class GroupSums(Reducer[Tensor]):
    """The sum of scores per group, (Q, G) in float64."""

    def __init__(self, queries: int, groups: int, device: torch.device) -> None:
        self.sums = torch.zeros(queries, groups, dtype=torch.float64, device=device)

    def prepare(self, chunk: Chunk, scores: Tensor, codes: Tensor) -> Any:
        """Sum a chunk's scores by group where groups are few."""
        groups = self.sums.shape[1]
        if groups > FEW:
            return scores.contiguous(), codes
        parts = zip(scores.split(LONG, dim=1), codes.split(LONG), strict=True)
        return sum((members(of, groups, part.dtype).T @ part.T).T.double() for part, of in parts), None

    def take(self, prepared: tuple[Tensor, Tensor | None]) -> None:
        """Add a chunk's sums, or its scores by group."""
        scores, codes = prepared
        if codes is None:
            self.sums += scores
        else:
            self.sums.index_add_(1, codes, scores.double())

    def of_distinct(self, distinct: Distinct, codes: Tensor) -> "Reducer[Tensor] | None":
        """Return what counts each key's score as often as patterns of a group have it, where groups are few."""
        queries, groups = self.sums.shape
        return CountedSums(queries, groups, distinct, codes) if groups <= FEW else None

    def merge(self, other: Self) -> Self:
        """Add the sums."""
        self.sums += other.sums
        return self

    def result(self) -> Tensor:
        """Return the sums."""
        return self.sums


class CountedSums(GroupSums):
    """The sum of scores per group, where chunks are of distinct keys and each counts as often as patterns have it."""

    def __init__(self, queries: int, groups: int, distinct: Distinct, codes: Tensor) -> None:
        super().__init__(queries, groups, codes.device)
        self.numbers = distinct.numbers
        self.counts = distinct.counts(codes, groups, torch.float32)  # (G, U)

    def prepare(self, chunk: Chunk, scores: Tensor, codes: Tensor) -> Any:
        """Sum a chunk's scores by group."""
        start = int(np.searchsorted(self.numbers, chunk.patterns[0]))
        counts = self.counts[:, start : start + len(chunk.patterns)].to(scores.dtype)
        return (counts @ scores.T).T, None


class Places(Reducer["Places"]):
    """Per group (a place in a text) and query: the sum of scores and the best score; and how many scores there are.

    For groups by the million.
    """

    def __init__(self, queries: int, groups: int, device: torch.device) -> None:
        self.sums = torch.zeros(queries, groups, dtype=torch.float64, device=device)
        self.best = torch.full((queries, groups), -torch.inf, device=device)
        self.counts = torch.zeros(groups, dtype=torch.int64, device=device)

    def take(self, prepared: Any) -> None:
        """Add a chunk's scores, and let them compete, by group."""
        _, scores, codes = prepared
        self.sums.index_add_(1, codes, scores.double())
        self.best.scatter_reduce_(1, codes.expand_as(scores), scores.float(), "amax")
        self.counts.index_add_(0, codes, torch.ones_like(codes))

    def merge(self, other: Self) -> Self:
        """Add the sums, and keep the better of the best."""
        self.sums += other.sums
        self.counts += other.counts
        self.best = torch.maximum(self.best, other.best)
        return self

    def result(self) -> "Places":
        """Return this: its sums (Q, G), best (Q, G) and counts (G,)."""
        return self


class Everything(Reducer[Tensor]):
    """Every score, (Q, T): for small memories and few queries."""

    def __init__(self, queries: int, numbers: npt.NDArray[np.int64]) -> None:
        self.queries = queries
        self.numbers = numbers  # (T,) of all patterns that will come, ascending; each chunk's are next to each other
        self.scores: Tensor | None = None
        self.filled: list[slice] = []
        self._lock = threading.Lock()

    def prepare(self, chunk: Chunk, scores: Tensor, codes: Tensor) -> slice:
        """Put a chunk's scores in their place."""
        if len(chunk.patterns) == len(self.numbers) and scores.device.type != "cpu":
            self.scores = scores  # all there is, in memory that is not used again
            return slice(0, len(self.numbers))
        start = int(np.searchsorted(self.numbers, chunk.patterns[0]))
        place = slice(start, start + len(chunk.patterns))
        with self._lock:
            if self.scores is None:
                self.scores = scores.new_empty(self.queries, len(self.numbers))
        self.scores[:, place] = scores
        return place

    def of_distinct(self, distinct: Distinct, codes: Tensor) -> "Reducer[Tensor] | None":
        """Return what keeps every key's score, and gives each pattern that of its key."""
        return Repeated(self.queries, distinct)

    def take(self, prepared: slice) -> None:
        """Note what is in its place."""
        self.filled.append(prepared)

    def merge(self, other: Self) -> Self:
        """Keep both."""
        if self.scores is None:
            return other
        for place in other.filled:
            assert other.scores is not None, "what is filled is there"
            self.scores[:, place] = other.scores[:, place]
        self.filled += other.filled
        return self

    def result(self) -> Tensor:
        """Return the scores in the order of the patterns."""
        return torch.zeros(self.queries, 0) if self.scores is None else self.scores


class Repeated(Everything):
    """Every score, (Q, T), where chunks are of distinct keys."""

    def __init__(self, queries: int, distinct: Distinct) -> None:
        super().__init__(queries, distinct.numbers)
        self.places = torch.from_numpy(distinct.places)

    def result(self) -> Tensor:
        """Return the score of each pattern's key."""
        return super().result()[:, self.places]


class Outputs(Reducer[Tensor]):
    """The sum of contributions per group, (Q, G, d_out) in float64; scores are what multiplies the values."""

    wide = True

    def __init__(self, queries: int, groups: int, width: int, device: torch.device) -> None:
        self.sums = torch.zeros(queries, groups, width, dtype=torch.float64, device=device)

    def take(self, prepared: Any) -> None:
        """Add a chunk's contributions, by group."""
        chunk, scores, codes = prepared
        assert chunk.values is not None, "contributions need values"
        for group in codes.unique().tolist():
            members = codes == group
            self.sums[:, group] += scores[:, members] @ chunk.values[members]

    def merge(self, other: Self) -> Self:
        """Add the sums."""
        self.sums += other.sums
        return self

    def result(self) -> Tensor:
        """Return the sums."""
        return self.sums


class KeySums(Reducer[Tensor]):
    """The sum of keys per group, (G, d_in) in float64: a signed total is its product with a query."""

    def __init__(self, groups: int, width: int, device: torch.device) -> None:
        self.sums = torch.zeros(groups, width, dtype=torch.float64, device=device)

    def prepare(self, chunk: Chunk, scores: Tensor, codes: Tensor) -> Any:
        """Sum a chunk's keys by group, a block at a time: a float32 sum of few is as exact as its terms."""
        groups = len(self.sums)
        if groups > FEW:
            return chunk.keys, codes
        total = torch.zeros_like(self.sums)
        for keys, of in zip(chunk.keys.split(BLOCK), codes.split(BLOCK), strict=True):
            total += members(of, groups, keys.dtype).T @ keys
        return total, None

    def take(self, prepared: tuple[Tensor, Tensor | None]) -> None:
        """Add a chunk's sums, or its keys by group."""
        keys, codes = prepared
        if codes is None:
            self.sums += keys
        else:
            self.sums.index_add_(0, codes, keys.double())

    def merge(self, other: Self) -> Self:
        """Add the sums."""
        self.sums += other.sums
        return self

    def result(self) -> Tensor:
        """Return the sums."""
        return self.sums


class GroupShares(Reducer[dict[ParameterUse, Tensor]]):
    """Each group's share of each of a layer's parameters, use -> (G, *shape) in float64."""

    wide = True

    def __init__(self, groups: int, shapes: Mapping[ParameterUse, Sequence[int]], device: torch.device) -> None:
        self.shares = {
            use: torch.zeros(groups, *shape, dtype=torch.float64, device=device) for use, shape in shapes.items()
        }

    def take(self, prepared: Any) -> None:
        """Add a chunk's gradients, by group."""
        chunk, _, codes = prepared
        assert chunk.values is not None, "shares need values"
        for group in codes.unique().tolist():
            members = codes == group
            values, keys = chunk.values[members], chunk.keys[members]
            for use, coefficients in chunk.coefficients.items():
                share, parameter_map = self.shares[use][group], use.parameter_map
                scaled_values = scaled(values, coefficients[members], parameter_map)
                share += parameter_map.gradient(scaled_values, keys, share.shape)

    def merge(self, other: Self) -> Self:
        """Add the shares."""
        for use, share in other.shares.items():
            self.shares[use] += share
        return self

    def result(self) -> dict[ParameterUse, Tensor]:
        """Return the shares by use."""
        return self.shares


def joined(results: Sequence[Any]) -> Any:
    """Return the results of several blocks of queries as one: tensors, or tuples of tensors, one after the other."""
    if isinstance(results[0], tuple):
        return tuple(torch.cat(parts) for parts in zip(*results, strict=True))
    return torch.cat(list(results))
