"""What a streaming pass can add up: one small class per question.

A reducer takes chunks in any order and number: first it prepares what it can from a chunk alone, which threads do side
by side, then it takes that in. `merge` joins two reducers of different patterns, and is associative, so a pass may be
split. Shapes: Q queries, n patterns of a chunk, G groups.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from dualform.forms import form
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

    keeps = False  # whether it holds on to scores, whose memory is used again otherwise
    wide = False  # whether taking a chunk is work for all threads, so that chunks are not prepared side by side

    def prepare(self, chunk: Chunk, scores: Tensor, codes: Tensor) -> Any:
        """Make of a chunk, its scores (Q, n) and its patterns' groups (n,) what `take` needs: here just that.

        Several threads may do so at once. What is prepared is taken before the same thread reads another chunk.
        """
        return chunk, scores, codes

    @abstractmethod
    def take(self, prepared: Any) -> None:
        """Add what was prepared of a chunk, one at a time."""

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
            return scores, codes
        if len(codes) <= LONG:
            return scores @ members(codes, groups, scores.dtype), None
        parts = zip(scores.split(LONG, dim=1), codes.split(LONG), strict=True)
        return sum((part @ members(of, groups, part.dtype)).double() for part, of in parts), None

    def take(self, prepared: tuple[Tensor, Tensor | None]) -> None:
        """Add a chunk's sums, or its scores by group."""
        scores, codes = prepared
        if codes is None:
            self.sums += scores
        else:
            self.sums.index_add_(1, codes, scores.double())

    def merge(self, other: Self) -> Self:
        """Add the sums."""
        self.sums += other.sums
        return self

    def result(self) -> Tensor:
        """Return the sums."""
        return self.sums


class Best(Reducer[tuple[Tensor, Tensor]]):
    """The k best scores per group and the patterns they belong to, (Q, G, k); -1 and infinity where there are few.

    Once there are k of each, only scores that beat the worst of them are looked at: far fewer than there are patterns.
    They are collected, and compete when there are enough of them.
    """

    def __init__(self, queries: int, groups: int, k: int, *, largest: bool, device: torch.device) -> None:
        worst = -torch.inf if largest else torch.inf
        self.largest = largest
        self.scores = torch.full((queries, groups, k), worst, dtype=torch.float64, device=device)
        self.patterns = torch.full((queries, groups, k), -1, dtype=torch.int64, device=device)
        self._limits: dict[int, Tensor] = {}  # group -> (Q,) the worst that is kept, where k of each are
        self._waiting: dict[int, list[Candidates]] = {}  # group -> what beat them

    def prepare(self, chunk: Chunk, scores: Tensor, codes: Tensor) -> list[tuple[int, "Ranked | Candidates"]]:
        """Find the scores that can be among the best, by group."""
        numbers = chunk.numbers
        if self.scores.shape[1] == 1:
            return [(0, self._candidates(0, scores, numbers))]
        found: list[tuple[int, Ranked | Candidates]] = []
        for group in codes.unique().tolist():
            mine = (codes == group).nonzero()[:, 0]
            found.append((group, self._candidates(group, scores[:, mine], numbers[mine])))
        return found

    def take(self, prepared: list[tuple[int, "Ranked | Candidates"]]) -> None:
        """Let them compete with the best so far."""
        for group, found in prepared:
            if isinstance(found, Ranked):
                self._settle(group)  # what waits came first, and wins where scores are equal
                self._keep(group, found.scores, found.patterns)
            else:
                waiting = self._waiting.setdefault(group, [])
                waiting.append(found)
                if 2 * sum(len(part.rows) for part in waiting) > self.scores.shape[0] * self.scores.shape[2]:
                    self._settle(group)

    def compete(self, group: int, scores: Tensor, numbers: Tensor) -> None:
        """Let scores (Q, n) of the patterns with these numbers (n,) compete in a group."""
        self.take([(group, self._candidates(group, scores, numbers))])

    def _candidates(self, group: int, scores: Tensor, numbers: Tensor) -> "Ranked | Candidates":
        limits = self._limits.get(group)
        if limits is None or scores.device.type != "cpu":  # elsewhere, to count them would wait for the device
            best = self._best(scores, min(self.scores.shape[2], scores.shape[1]))
            return Ranked(best[0].double(), numbers[best[1]])
        limits = limits.to(scores.dtype)[:, None]
        better = scores > limits if self.largest else scores < limits
        flat = torch.from_numpy(np.flatnonzero(better.numpy()))  # twice as fast as torch's
        rows = flat // scores.shape[1]
        return Candidates(rows, scores.reshape(-1)[flat].double(), numbers[flat - rows * scores.shape[1]])

    def _keep(self, group: int, scores: Tensor, patterns: Tensor) -> None:
        k = self.scores.shape[2]
        scores = torch.cat([self.scores[:, group], scores], dim=1)
        patterns = torch.cat([self.patterns[:, group], patterns], dim=1)
        values, places = self._best(scores, k)
        self.scores[:, group] = values
        self.patterns[:, group] = patterns.gather(1, places)
        if scores.device.type == "cpu" and (group in self._limits or bool((self.patterns[:, group, -1] >= 0).all())):
            self._limits[group] = values[:, -1]

    def _best(self, scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k best of each row, best first; of equal ones the first, however chunks were cut or prepared."""
        if scores.device.type != "cpu":
            best = scores.topk(k, dim=1, largest=self.largest)
            return best.values, best.indices
        ordered = scores.sort(dim=1, descending=self.largest, stable=True)
        return ordered.values[:, :k], ordered.indices[:, :k]

    def _settle(self, group: int) -> None:
        """Let what is waiting compete, a few of each query's candidates at a time."""
        waiting = self._waiting.pop(group, [])
        if not waiting:
            return
        rows = torch.cat([part.rows for part in waiting])
        order = rows.argsort(stable=True)
        rows = rows[order]
        scores = torch.cat([part.scores for part in waiting])[order]
        patterns = torch.cat([part.patterns for part in waiting])[order]
        counts = torch.bincount(rows, minlength=self.scores.shape[0])
        place = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]  # of each among its query's
        width = 2 * self.scores.shape[2]
        for start in range(0, int(counts.max()), width):
            mine = (place >= start) & (place < start + width)
            size = (self.scores.shape[0], min(width, int(counts.max()) - start))
            at = (rows[mine], place[mine] - start)
            wide = torch.full(size, -torch.inf if self.largest else torch.inf, dtype=torch.float64)
            wide[at] = scores[mine]
            named = torch.full(size, -1)
            named[at] = patterns[mine]
            self._keep(group, wide, named)

    def merge(self, other: Self) -> Self:
        """Let the other's best compete with these."""
        scores, patterns = other.result()
        for group in range(self.scores.shape[1]):
            self._settle(group)
            self._keep(group, scores[:, group], patterns[:, group])
        return self

    def result(self) -> tuple[Tensor, Tensor]:
        """Return the scores, best first, and their patterns."""
        for group in list(self._waiting):
            self._settle(group)
        return self.scores, self.patterns


@dataclass(frozen=True, slots=True)
class Ranked:
    """The best of some patterns for each query, (Q, n)."""

    scores: Tensor
    patterns: Tensor


@dataclass(frozen=True, slots=True)
class Candidates:
    """Single scores that may be among the best: of which query, how much, which pattern; (c,) each."""

    rows: Tensor
    scores: Tensor
    patterns: Tensor


class BestSums(Reducer[tuple[Tensor, Tensor]]):
    """The k best members of each group, where a member's score is the sum over its patterns; otherwise as `Best`.

    Chunks come with their patterns' members for codes.
    """

    def __init__(
        self, queries: int, groups: int, k: int, group_of: Tensor, stands_for: Tensor, *, largest: bool
    ) -> None:
        self.shape = (queries, groups, k)
        self.largest = largest
        self.group_of = group_of  # (M,) each member's group; -1 for one that does not compete
        self.stands_for = stands_for  # (M,) the pattern that each member is known by
        self.totals = GroupSums(queries, len(group_of), group_of.device)

    def prepare(self, chunk: Chunk, scores: Tensor, codes: Tensor) -> Any:
        """Sum a chunk's scores by member where they are few."""
        return self.totals.prepare(chunk, scores, codes)

    def take(self, prepared: Any) -> None:
        """Add a chunk's scores, by member."""
        self.totals.take(prepared)

    def merge(self, other: Self) -> Self:
        """Add the sums."""
        self.totals.merge(other.totals)
        return self

    def result(self) -> tuple[Tensor, Tensor]:
        """Return the best sums, best first, and the patterns that stand for their members."""
        best = Best(*self.shape, largest=self.largest, device=self.group_of.device)
        for group in range(self.shape[1]):
            members = (self.group_of == group).nonzero()[:, 0]
            best.compete(group, self.totals.sums[:, members], self.stands_for[members])
        return best.result()


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

    keeps = True

    def __init__(self) -> None:
        self.parts: list[tuple[int, Tensor]] = []

    def take(self, prepared: Any) -> None:
        """Keep a chunk's scores."""
        chunk, scores, _ = prepared
        self.parts.append((int(chunk.patterns[0]), scores))

    def merge(self, other: Self) -> Self:
        """Keep both."""
        self.parts += other.parts
        return self

    def result(self) -> Tensor:
        """Return the scores in the order of the patterns."""
        if len(self.parts) == 1:
            return self.parts[0][1]
        return torch.cat([scores for _, scores in sorted(self.parts, key=lambda part: part[0])], dim=1)


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


class GroupShares(Reducer[dict[str, Tensor]]):
    """Each group's share of each of a layer's parameters, role -> (G, *shape) in float64."""

    wide = True

    def __init__(self, groups: int, shapes: Mapping[str, Sequence[int]], device: torch.device) -> None:
        self.shares = {
            role: torch.zeros(groups, *shape, dtype=torch.float64, device=device) for role, shape in shapes.items()
        }

    def take(self, prepared: Any) -> None:
        """Add a chunk's gradients, by group."""
        chunk, _, codes = prepared
        assert chunk.values is not None, "shares need values"
        for group in codes.unique().tolist():
            members = codes == group
            values, keys = chunk.values[members], chunk.keys[members]
            for role, coefficients in chunk.coefficients.items():
                share = self.shares[role][group]
                share += form(role).gradient(scaled(values, coefficients[members], role), keys, share.shape)

    def merge(self, other: Self) -> Self:
        """Add the shares."""
        for role, share in other.shares.items():
            self.shares[role] += share
        return self

    def result(self) -> dict[str, Tensor]:
        """Return the shares by role."""
        return self.shares


def joined(results: Sequence[Any]) -> Any:
    """Return the results of several blocks of queries as one: tensors, or tuples of tensors, one after the other."""
    if isinstance(results[0], tuple):
        return tuple(torch.cat(parts) for parts in zip(*results, strict=True))
    return torch.cat(list(results))
