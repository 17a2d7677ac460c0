"""The k best patterns, found fast: once k are known, only measures that beat the worst of them are looked at.

Far fewer than there are patterns do. They are collected, and compete when there are enough of them. Threads filter
their blocks by limits that another thread may be tightening; a limit that is out of date only lets more candidates
through, and candidates are taken in the order of patterns, so that the answer is that of `reducers.Best`.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualform.engine.block import Block
from dualform.engine.reducers import Best, BestState


@dataclass(frozen=True, slots=True)
class Ranked:
    """The best of some patterns for each query, (Q, n)."""

    measures: Tensor
    patterns: Tensor


@dataclass(frozen=True, slots=True)
class Candidates:
    """Single measures that may be among the best: of which query, how much, which pattern; (c,) each."""

    rows: Tensor
    measures: Tensor
    patterns: Tensor


class RacingBest:
    """`reducers.Best` over blocks that several threads prepare and one at a time takes, in order."""

    def __init__(self, reducer: Best, state: BestState) -> None:
        self._reducer = reducer
        self._state = state
        self._limits: dict[int, Tensor] = {}  # group -> (Q,) the worst of the k best, where there are k
        self._waiting: dict[int, list[Candidates]] = {}  # group -> candidates that have not competed yet

    def prepare(self, block: Block, measures: Tensor, groups_of: Tensor) -> list[tuple[int, Ranked | Candidates]]:
        """Return the measures that can be among the best, by group."""
        ids = block.pattern_ids
        if self._reducer.groups == 1:
            return [(0, self._candidates(0, measures, ids))]
        found: list[tuple[int, Ranked | Candidates]] = []
        for group in groups_of.unique().tolist():
            mine = (groups_of == group).nonzero()[:, 0]
            found.append((group, self._candidates(group, measures[:, mine], ids[mine])))
        return found

    def take(self, prepared: list[tuple[int, Ranked | Candidates]]) -> None:
        """Let a block's candidates compete with the best so far."""
        for group, found in prepared:
            if isinstance(found, Ranked):
                self._settle(group)  # waiting candidates are of earlier patterns, and win where measures are equal
                self._compete(group, found.measures, found.patterns)
            else:
                waiting = self._waiting.setdefault(group, [])
                waiting.append(found)
                if 2 * sum(len(part.rows) for part in waiting) > len(self._state.measures) * self._reducer.k:
                    self._settle(group)

    def result(self) -> BestState:
        """Return the best measures, best first, and their patterns."""
        return self._reducer.result(self.state())

    def state(self) -> BestState:
        """Return the reducer's state of all patterns so far; the race goes on with it."""
        for group in list(self._waiting):
            self._settle(group)
        return self._state

    def _candidates(self, group: int, measures: Tensor, ids: Tensor) -> Ranked | Candidates:
        limits = self._limits.get(group)
        if limits is None or measures.device.type != "cpu":  # on a GPU, to count candidates would wait for the device
            best = self._reducer.order(measures, min(self._reducer.k, measures.shape[1]))
            return Ranked(best[0].double(), ids[best[1]])
        limits = limits.to(measures.dtype)
        by_pattern = measures.T.is_contiguous()  # in memory
        lying, worst = (measures.T, limits) if by_pattern else (measures, limits[:, None])
        better = (np.greater if self._reducer.largest else np.less)(lying.numpy(), worst.numpy())  # faster than torch's
        flat = torch.from_numpy(np.flatnonzero(better))
        first = flat // lying.shape[1]
        second = flat - first * lying.shape[1]
        rows, places = (second, first) if by_pattern else (first, second)
        return Candidates(rows, lying[first, second].double(), ids[places])

    def _compete(self, group: int, measures: Tensor, patterns: Tensor) -> None:
        self._reducer.compete(self._state, group, measures, patterns)
        if measures.device.type == "cpu":
            last = self._state.patterns[:, group, -1]
            if group in self._limits or bool((last >= 0).all()):
                self._limits[group] = self._state.measures[:, group, -1].clone()

    def _settle(self, group: int) -> None:
        """Let waiting candidates compete, a few of each query's at a time."""
        waiting = self._waiting.pop(group, [])
        if not waiting:
            return
        rows = torch.cat([part.rows for part in waiting])
        order = rows.argsort(stable=True)
        rows = rows[order]
        measures = torch.cat([part.measures for part in waiting])[order]
        patterns = torch.cat([part.patterns for part in waiting])[order]
        counts = torch.bincount(rows, minlength=len(self._state.measures))
        place = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]  # of each among its query's
        width = 2 * self._reducer.k
        for start in range(0, int(counts.max()), width):
            mine = (place >= start) & (place < start + width)
            size = (len(self._state.measures), min(width, int(counts.max()) - start))
            at = (rows[mine], place[mine] - start)
            wide = torch.full(size, self._reducer.worst, dtype=torch.float64)
            wide[at] = measures[mine]
            named = torch.full(size, -1)
            named[at] = patterns[mine]
            self._compete(group, wide, named)
