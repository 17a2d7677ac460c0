"""Answers worth keeping for a while: the last few, each computed once however many threads ask for it."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class Kept(Generic[V]):
    """The last `size` values by key; `dropped` is told of each value that makes room."""

    def __init__(self, size: int, *, dropped: Callable[[V], None] | None = None) -> None:
        self._size = size
        self._dropped = dropped
        self._values: OrderedDict[Hashable, V] = OrderedDict()
        self._busy: dict[Hashable, threading.Lock] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, compute: Callable[[], V]) -> V:
        """Return the value of a key; whoever comes first computes it, and the others wait for that."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
            busy = self._busy.setdefault(key, threading.Lock())
        with busy:
            with self._lock:
                if key in self._values:
                    return self._values[key]
            try:
                value = compute()
            finally:
                with self._lock:
                    self._busy.pop(key, None)
            with self._lock:
                self._values[key] = value
                while len(self._values) > self._size:
                    _, gone = self._values.popitem(last=False)
                    if self._dropped is not None:
                        self._dropped(gone)
            return value

    def values(self) -> list[V]:
        """Return what is kept now."""
        with self._lock:
            return list(self._values.values())
