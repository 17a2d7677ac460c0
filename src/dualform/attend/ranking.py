"""Reducers that rank: the best patterns, or the best members by the sum over their patterns."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from dualform.attend.reducers import GroupSums, Reducer
from dualform.store.stream import Chunk


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
        limits = limits.to(scores.dtype)
        by_pattern = scores.T.is_contiguous()  # in memory
        lying, worst = (scores.T, limits) if by_pattern else (scores, limits[:, None])
        better = (np.greater if self.largest else np.less)(lying.numpy(), worst.numpy())  # faster than torch's
        flat = torch.from_numpy(np.flatnonzero(better))
        first = flat // lying.shape[1]
        second = flat - first * lying.shape[1]
        rows, places = (second, first) if by_pattern else (first, second)
        return Candidates(rows, lying[first, second].double(), numbers[places])

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
