"""Scores of all patterns of one layer for some queries, reduced: kept from the last question, or found by a pass.

What is asked, and what the numbers mean, is up to `spotlight.py`.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from dualform.attend.backward import score_backward
from dualform.attend.engine import Score, score_patterns
from dualform.attend.groups import Grouping, Table
from dualform.attend.reducers import Everything, Reducer, joined, one_group
from dualform.attend.sums import LayerSums
from dualform.store.stream import Chunk

R = TypeVar("R")
BLOCK = 1 << 14  # queries of one pass at most
KEPT = 64 << 20  # bytes of scores that are remembered, so that the next question needs no pass
MOST_KEPT = 2  # kinds of scores that are remembered
FIRST = 1 << 12  # kept scores that are reduced at first: all of these are ranked, and later what beats the best of them
SLICE = 1 << 16  # and later at a time at most


class LayerScoring:
    """Scores every pattern of a view of a layer against its queries, (Q, d_in)."""

    def __init__(self, table: Table, layer: str, queries: Tensor, sums: LayerSums, chunk_size: int | None) -> None:
        self._table = table
        self._layer = layer
        self._queries = queries
        self._sums = sums
        self._chunk_size = chunk_size
        self._kept: dict[Any, Tensor] = {}

    def count(self) -> int:
        """Return the number of patterns in this view of the layer."""
        return self._table.count(self._layer)

    def numbers(self) -> npt.NDArray[np.int64]:
        """Return the number of each of them, counted over all shards."""
        return self._table.kept(self._layer)

    def reduce(
        self, score: Score, grouping: Grouping | None, make: Callable[[int], Reducer[R]], block: int | None = None
    ) -> R:
        """Reduce the scores of all patterns: those that are kept, or else by a pass over them."""
        scores = self._scores(score) if len(self._queries) <= min(BLOCK, block or BLOCK) else None
        if scores is None:
            return self._pass(score, grouping, make, block)
        reducer = make(len(self._queries))
        if isinstance(reducer, Everything):
            return scores.clone()  # type: ignore[return-value]  # what is kept stays ours
        numbers, device = self.numbers(), self._queries.device
        codes = one_group(len(numbers), device) if grouping is None else grouping.on(device)
        for part in _slices(len(numbers)) if device.type == "cpu" else [slice(0, len(numbers))]:
            chunk = Chunk(numbers[part], self._queries[:0])
            reducer.update(chunk, scores[:, part], codes[part])
        return reducer.result()

    def _scores(self, score: Score) -> Tensor | None:
        """Return every pattern's score, (Q, T), where they are few enough to be kept for the next question."""
        if self._chunk_size is not None or (score.needs_values and score.units is None):
            return None
        if self._sums.like.dtype.itemsize * len(self._queries) * self.count() > KEPT:
            return None
        if score.of == "magnitude":
            attention = self._scores(Score("attention"))
            return None if attention is None else attention.abs()
        at = (score.of, None if score.units is None else tuple(score.units.tolist()))
        found = self._kept.get(at)
        if found is None:
            found = self._pass(score, None, lambda rows: Everything(rows, self.numbers()), None)
            self._kept = {at: found, **dict(list(self._kept.items())[: MOST_KEPT - 1])}
        return found

    def _pass(self, score: Score, grouping: Grouping | None, make: Callable[[int], Reducer[R]], block: int | None) -> R:
        """Run the plain pass in blocks of queries and join the results."""
        results = []
        size = min(BLOCK, block or BLOCK)
        dtype = self._sums.like.dtype
        for start in range(0, len(self._queries), size):
            rows = self._queries[start : start + size]
            units = None if score.units is None else score.units[start : start + size]
            reducer = make(len(rows))
            if units is not None and self._sums.replayed:
                results.append(score_backward(self._table, self._layer, rows, units, grouping, reducer, dtype=dtype))
                continue
            part = Score(score.of, units, score.shapes)
            distinct = self._distinct(part, grouping, reducer)
            results.append(
                score_patterns(
                    self._table,
                    self._layer,
                    rows,
                    part,
                    grouping if distinct is None else None,
                    reducer if distinct is None else distinct[0],
                    chunk_size=self._chunk_size,
                    numbers=None if distinct is None else distinct[1],
                )
            )
        whole: R = joined(results)
        return whole

    def _distinct(
        self, score: Score, grouping: Grouping | None, reducer: Reducer[R]
    ) -> tuple[Reducer[R], npt.NDArray[np.int64]] | None:
        """Return a reducer of distinct keys and their numbers, where scores depend on keys alone and keys repeat."""
        if score.needs_values or self._queries.device.type != "cpu":
            return None
        distinct = self._table.distinct(self._layer)
        if distinct is None:
            return None
        device = self._queries.device
        codes = one_group(self.count(), device) if grouping is None else grouping.on(device)
        found = reducer.of_distinct(distinct, codes)
        return None if found is None else (found, distinct.numbers)


def _slices(count: int) -> Iterator[slice]:
    """Yield slices of so many scores, each as long as all before: then in each as few can be among the best."""
    start = 0
    while start < count:
        stop = min(count, start + min(max(FIRST, start), SLICE))
        yield slice(start, stop)
        start = stop
