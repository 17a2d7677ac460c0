"""A queue between two threads, bounded in bytes: a full one makes the producer wait, a broken one tells it why."""

import threading
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from dualform.errors import StoreError

T = TypeVar("T")


class ByteQueue(Generic[T]):
    """First in, first out. An item larger than the limit passes when the queue is empty."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._closed = False
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

    def __iter__(self) -> Iterator[T]:
        """Yield the items, waiting for them; an item's bytes count until the next one is asked for.

        Ends when the queue is closed and empty, or has failed.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._failure is not None or self._closed or bool(self._items))
                if self._failure is not None or not self._items:
                    return
                item, nbytes = self._items[0]
            yield item
            del item  # or it would live on while the next one is awaited
            with self._changed:
                if self._failure is None:
                    self._items.popleft()
                    self._bytes -= nbytes
                self._changed.notify_all()

    def close(self) -> None:
        """Say that nothing more will come."""
        with self._changed:
            self._closed = True
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
            reason = str(self._failure).strip().rstrip(".") or type(self._failure).__name__
            raise StoreError(
                f"The memory could not be written: {reason}. What was published before stays readable. "
                "Free some space or choose another folder, and continue with resume=True."
            ) from self._failure
