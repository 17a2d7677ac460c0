"""Derived sums that are worth keeping: in memory for this process, and where the source keeps them for the next.

A sum is named by everything that it depends on: the source by its digest, the view, the layer, the grouping. Memory is
bounded, and what was used least recently goes first.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping

import xxhash
from torch import Tensor

from dualform.engine.source import PatternSource

MAX_CACHED_BYTES = 256 << 20  # a larger answer is computed each time
MAX_MEMORY_BYTES = 512 << 20  # of all answers of a run that are kept in this process

CachedTensors = dict[str, Tensor]


class AnswerCache:
    """The cache of one opened source."""

    def __init__(self, source: PatternSource) -> None:
        self._digest = source.digest
        self._sums = source.derived_sums
        self._here: OrderedDict[str, CachedTensors] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, what: object, compute: Callable[[], CachedTensors], *, budget: int | None = None) -> CachedTensors:
        """Return the tensors named by `what` (anything with a faithful repr), computing them if need be."""
        found = self.find(what)
        return self.keep(what, compute(), budget=budget) if found is None else found

    def find(self, what: object) -> CachedTensors | None:
        """Return the tensors named by `what`; None where there are none."""
        name = self._name(what)
        with self._lock:
            if name in self._here:
                self._here.move_to_end(name)
                return self._here[name]
        found = None if self._sums is None else self._sums.load(name)
        if found is not None:
            self._remember(name, found)
        return found

    def keep(self, what: object, answer: CachedTensors, *, budget: int | None = None) -> CachedTensors:
        """Keep tensors under the name of `what`, unless they are larger than a budget of bytes; return them."""
        found = {key: tensor.cpu().contiguous() for key, tensor in answer.items()}
        if _bytes_of(found) > (MAX_CACHED_BYTES if budget is None else budget):
            return found
        name = self._name(what)
        if self._sums is not None:
            self._sums.save(name, found)
        self._remember(name, found)
        return found

    def _name(self, what: object) -> str:
        return xxhash.xxh3_128_hexdigest(f"{self._digest} {what!r}".encode())

    def _remember(self, name: str, answer: CachedTensors) -> None:
        """Keep an answer in memory; the least recently used go while all together are too large."""
        with self._lock:
            self._here[name] = answer
            self._here.move_to_end(name)
            while self._here and sum(map(_bytes_of, self._here.values())) > MAX_MEMORY_BYTES:
                self._here.popitem(last=False)


def _bytes_of(answer: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in answer.values())
