"""What a streaming pass can add up: one small class per question.

A reducer takes chunks in any order and number; `merge` joins two reducers of different patterns, and is associative, so
a pass may be split. Shapes: Q queries, n patterns of a chunk, G groups.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from dualform.forms import form
from dualform.store.rebuild import scaled
from dualform.store.stream import Chunk

R = TypeVar("R")


class Reducer(ABC, Generic[R]):
    """Takes chunks, gives a result."""

    @abstractmethod
    def update(self, chunk: Chunk, scores: Tensor, codes: Tensor) -> None:
        """Take a chunk with its scores (Q, n) and its patterns' groups (n,)."""

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

    def update(self, chunk: Chunk, scores: Tensor, codes: Tensor) -> None:
        """Add a chunk's scores, by group."""
        groups = self.sums.shape[1]
        if groups <= 64:
            members = torch.zeros(len(codes), groups, dtype=scores.dtype, device=scores.device)
            members[torch.arange(len(codes), device=codes.device), codes] = 1
            self.sums += scores @ members
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
    """The k best scores per group and the patterns they belong to, (Q, G, k); -1 and infinity where there are few."""

    def __init__(self, queries: int, groups: int, k: int, *, largest: bool, device: torch.device) -> None:
        worst = -torch.inf if largest else torch.inf
        self.largest = largest
        self.scores = torch.full((queries, groups, k), worst, dtype=torch.float64, device=device)
        self.patterns = torch.full((queries, groups, k), -1, dtype=torch.int64, device=device)

    def update(self, chunk: Chunk, scores: Tensor, codes: Tensor) -> None:
        """Let a chunk's scores compete with the best so far."""
        numbers = torch.from_numpy(chunk.patterns).to(scores.device)
        if self.scores.shape[1] == 1:
            self.compete(0, scores, numbers)
            return
        for group in codes.unique().tolist():
            members = (codes == group).nonzero()[:, 0]
            self.compete(group, scores[:, members], numbers[members])

    def compete(self, group: int, scores: Tensor, numbers: Tensor) -> None:
        """Let scores (Q, n) of the patterns with these numbers (n,) compete in a group."""
        k = self.scores.shape[2]
        best = scores.topk(min(k, scores.shape[1]), dim=1, largest=self.largest)
        self._keep(group, best.values.double(), numbers[best.indices])

    def _keep(self, group: int, scores: Tensor, patterns: Tensor) -> None:
        k = self.scores.shape[2]
        scores = torch.cat([self.scores[:, group], scores], dim=1)
        patterns = torch.cat([self.patterns[:, group], patterns], dim=1)
        best = scores.topk(k, dim=1, largest=self.largest, sorted=True)
        self.scores[:, group] = best.values
        self.patterns[:, group] = patterns.gather(1, best.indices)

    def merge(self, other: Self) -> Self:
        """Let the other's best compete with these."""
        for group in range(self.scores.shape[1]):
            self._keep(group, other.scores[:, group], other.patterns[:, group])
        return self

    def result(self) -> tuple[Tensor, Tensor]:
        """Return the scores, best first, and their patterns."""
        return self.scores, self.patterns


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

    def update(self, chunk: Chunk, scores: Tensor, codes: Tensor) -> None:
        """Add a chunk's scores, by member."""
        self.totals.update(chunk, scores, codes)

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

    def update(self, chunk: Chunk, scores: Tensor, codes: Tensor) -> None:
        """Add a chunk's scores, and let them compete, by group."""
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

    def __init__(self) -> None:
        self.parts: list[tuple[int, Tensor]] = []

    def update(self, chunk: Chunk, scores: Tensor, codes: Tensor) -> None:
        """Keep a chunk's scores."""
        self.parts.append((int(chunk.patterns[0]), scores))

    def merge(self, other: Self) -> Self:
        """Keep both."""
        self.parts += other.parts
        return self

    def result(self) -> Tensor:
        """Return the scores in the order of the patterns."""
        return torch.cat([scores for _, scores in sorted(self.parts, key=lambda part: part[0])], dim=1)


class Outputs(Reducer[Tensor]):
    """The sum of contributions per group, (Q, G, d_out) in float64; scores are what multiplies the values."""

    def __init__(self, queries: int, groups: int, width: int, device: torch.device) -> None:
        self.sums = torch.zeros(queries, groups, width, dtype=torch.float64, device=device)

    def update(self, chunk: Chunk, scores: Tensor, codes: Tensor) -> None:
        """Add a chunk's contributions, by group."""
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

    def update(self, chunk: Chunk, scores: Tensor, codes: Tensor) -> None:
        """Add a chunk's keys, by group."""
        self.sums.index_add_(0, codes, chunk.keys.double())

    def merge(self, other: Self) -> Self:
        """Add the sums."""
        self.sums += other.sums
        return self

    def result(self) -> Tensor:
        """Return the sums."""
        return self.sums


class GroupShares(Reducer[dict[str, Tensor]]):
    """Each group's share of each of a layer's parameters, role -> (G, *shape) in float64."""

    def __init__(self, groups: int, shapes: Mapping[str, Sequence[int]], device: torch.device) -> None:
        self.shares = {
            role: torch.zeros(groups, *shape, dtype=torch.float64, device=device) for role, shape in shapes.items()
        }

    def update(self, chunk: Chunk, scores: Tensor, codes: Tensor) -> None:
        """Add a chunk's gradients, by group."""
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
