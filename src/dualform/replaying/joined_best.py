"""The best patterns of several passes on a GPU, found together: one sort for all layers and several steps.

A sort of few numbers costs a GPU what its start costs, and there would be one for each layer and step. So measures wait
until there are enough of them, and those of all passes compete in one sort. The answer is that of `reducers.Best`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dualform.engine.block import Block
from dualform.engine.reducers import Best, BestState

WAITING_BYTES = 64 << 20
"""Size of the measures of all passes that wait before they compete."""


class JoinedBest:
    """Passes with the same number of queries, each for the k best of all patterns of its layer.

    Args:
        reducer: what every pass asks for, with one group.
        passes: the number of passes, P.
        queries: the number of queries of each pass, Q.
        like: says where to compute, and in which dtype measures come.
    """

    def __init__(self, reducer: Best, passes: int, queries: int, like: Tensor) -> None:
        shape = (passes, queries, reducer.k)
        self._reducer = reducer
        self._measures = torch.full(shape, reducer.worst, dtype=like.dtype, device=like.device)  # (P, Q, k)
        self._patterns = torch.full(shape, -1, dtype=torch.int64, device=like.device)  # (P, Q, k)
        self._waiting: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(passes)]  # measures and patterns
        self._bytes = 0

    def add(self, place: int, block: Block, measures: Tensor) -> None:
        """Let a block's patterns with measures (Q, n) compete in one of the passes, now or later."""
        self._waiting[place].append((measures, block.pattern_ids))
        self._bytes += measures.nbytes

    def settle_if_many(self) -> None:
        """Let waiting measures compete where they take much memory."""
        if self._bytes >= WAITING_BYTES:
            self._settle()

    def result(self, place: int) -> BestState:
        """Return the answer of a pass: the best measures, best first, and their patterns."""
        self._settle()
        state = BestState(self._measures[place, :, None].double(), self._patterns[place, :, None].clone())
        return self._reducer.result(state)

    def _settle(self) -> None:
        by_size: dict[int, list[int]] = {}
        joined: dict[int, tuple[Tensor, Tensor]] = {}
        for place, waiting in enumerate(self._waiting):
            if waiting:
                joined[place] = _cat([one for one, _ in waiting], 1), _cat([ids for _, ids in waiting], 0)
                by_size.setdefault(joined[place][0].shape[1], []).append(place)
        for places in by_size.values():
            self._compete(places, *map(torch.stack, zip(*(joined[place] for place in places), strict=True)))
        self._waiting = [[] for _ in self._waiting]
        self._bytes = 0

    def _compete(self, places: Sequence[int], measures: Tensor, patterns: Tensor) -> None:
        """Let later patterns (p, n) with measures (p, Q, n) compete with the best so far of some passes."""
        k = self._reducer.k
        whole = len(places) == len(self._waiting)
        mine: slice | Tensor = slice(None) if whole else torch.tensor(places, device=measures.device)
        every = torch.cat([self._measures[mine], measures], dim=2)
        best = every.topk(k, dim=2, largest=self._reducer.largest)
        earlier = self._patterns[mine].gather(2, best.indices.clamp(max=k - 1))
        later = patterns[:, None].expand_as(measures).gather(2, (best.indices - k).clamp_(min=0))
        self._patterns[mine] = torch.where(best.indices < k, earlier, later)
        self._measures[mine] = best.values


def _cat(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)
