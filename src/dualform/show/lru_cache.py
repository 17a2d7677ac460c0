"""A cache of the values that were used last, each computed once however many threads ask for it."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class LruCache(Generic[V]):
    """The `size` values that were used last, by key; `dropped` is called with each value that makes room."""

    def __init__(self, size: int, *, dropped: Callable[[V], None] | None = None) -> None:
        self._size = size
        self._dropped = dropped
        self._values: OrderedDict[Hashable, V] = OrderedDict()
        self._busy: dict[Hashable, threading.Lock] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, compute: Callable[[], V]) -> V:
        """Return the value of a key; the first thread that asks computes it, and the others wait for that."""
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

    def drop(self, key: Hashable, value: V) -> None:
        """Forget the value of a key, if it is still this one; `dropped` is not called."""
        with self._lock:
            if self._values.get(key) is value:
                del self._values[key]

    def values(self) -> list[V]:
        """Return the values that are in the cache now."""
        with self._lock:
            return list(self._values.values())
