"""A queue between two threads, bounded in bytes: a full one makes the producer wait, a broken one tells it why."""

import threading
from collections import deque
from typing import Generic, TypeVar

from dualform.errors import StoreError

T = TypeVar("T")


class ByteQueue(Generic[T]):
    """First in, first out. An item larger than the limit passes when the queue is empty."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._failure: Exception | None = None
        self._changed = threading.Condition()

    def put(self, item: T, nbytes: int) -> None:
        """Add an item, waiting for room; raise `StoreError` if the consumer has failed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or not self._items or self._bytes + nbytes <= self._limit
            )
            self.check()
            self._items.append((item, nbytes))
            self._bytes += nbytes
            self._changed.notify_all()

    def get(self) -> T:
        """Take the oldest item, waiting for one. Its bytes count until `done`."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._items))
            return self._items[0][0]

    def done(self) -> None:
        """Let go of the item that `get` gave."""
        with self._changed:
            _, nbytes = self._items.popleft()
            self._bytes -= nbytes
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Drop everything; every `put` and `join` from now on raises."""
        with self._changed:
            self._failure = error
            self._items.clear()
            self._bytes = 0
            self._changed.notify_all()

    def join(self) -> None:
        """Wait until everything was consumed; raise `StoreError` if the consumer has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or not self._items)
            self.check()

    def check(self) -> None:
        """Raise `StoreError` if the consumer has failed."""
        if self._failure is not None:
            raise StoreError(
                f"The memory could not be written: {self._failure} What was published before stays readable. "
                "Free some space or choose another folder, and continue with resume=True."
            ) from self._failure
