"""A queue between two threads, bounded in bytes: a full one makes the producer wait, a broken one tells it why.

Ctrl-C may interrupt the producer anywhere, also inside this file, and closing has to work all the same. An interrupt
between a lock's acquisition and the block that would release it leaks the lock, so nothing here takes one: items and
wake-up calls go through `queue.SimpleQueue`, which is safe to interrupt, and each counter is written by one thread.
"""

import contextlib
import queue
from collections.abc import Iterator
from typing import Generic, TypeVar

from dualform.errors import StoreError

Item = TypeVar("Item")
MAX_WAIT_SECONDS = 0.5  # after which a waiting producer looks again, in case that an interrupt lost its wake-up call


class _Mark:
    """A place in the queue that the producer waits for the consumer to reach."""


class ByteQueue(Generic[Item]):
    """First in, first out, with one producer and one consumer. A large item passes when the queue is empty."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: queue.SimpleQueue[tuple[Item, int] | _Mark | None] = queue.SimpleQueue()  # None: the end
        self._calls: queue.SimpleQueue[None] = queue.SimpleQueue()  # wake-up calls for the producer
        self._sent_bytes = 0  # written by the producer
        self._done_bytes = 0  # written by the consumer
        self._reached: _Mark | None = None  # the last mark that the consumer came to
        self._ended = False  # whether the consumer has stopped
        self._failure: Exception | None = None

    def put(self, item: Item, nbytes: int) -> None:
        """Add an item, waiting for room; raise `StoreError` if the consumer has failed."""
        self.wait_for_room(nbytes)
        with contextlib.suppress(queue.Empty):
            while True:
                self._calls.get_nowait()  # wake-up calls that nobody waited for
        self._items.put((item, nbytes))  # first: an interrupt before it is counted makes nobody wait for it
        self._sent_bytes += nbytes

    def wait_for_room(self, nbytes: int) -> None:
        """Wait until an item of this size would pass; raise `StoreError` if the consumer has failed."""
        while self._failure is None and not self._ended and self._bytes and self._bytes + nbytes > self._limit:
            self._sleep()
        self.check()

    def __iter__(self) -> Iterator[Item]:
        """Yield the items, waiting for them; an item's bytes count until the next one is asked for.

        Ends when the queue is closed and empty, or has failed.
        """
        while True:
            entry = self._items.get()
            if entry is None or self._failure is not None:
                self._ended = True
                self._calls.put(None)
                return
            if isinstance(entry, _Mark):
                self._reached = entry
                self._calls.put(None)
                continue
            item, nbytes = entry
            yield item
            del item, entry  # or it would live on while the next one is awaited
            self._done_bytes += nbytes
            self._calls.put(None)

    def close(self) -> None:
        """Tell the consumer that no more items will come."""
        self._items.put(None)

    def fail(self, error: Exception) -> None:
        """Drop everything; every `put` and `join` from now on raises."""
        self._failure = error
        with contextlib.suppress(queue.Empty):
            while True:
                self._items.get_nowait()
        self._items.put(None)
        self._calls.put(None)

    def join(self) -> None:
        """Wait until everything was consumed; raise `StoreError` if the consumer has failed."""
        mark = _Mark()  # and no counter, which an interrupt may have left behind
        self._items.put(mark)
        while self._failure is None and self._reached is not mark and not self._ended:
            self._sleep()
        self.check()

    def check(self) -> None:
        """Raise `StoreError` if the consumer has failed."""
        if self._failure is not None:
            reason = str(self._failure).strip().rstrip(".") or type(self._failure).__name__
            raise StoreError(
                f"The memory could not be written: {reason}. What was published before stays readable. "
                "Free some space or choose another folder, and continue with resume=True."
            ) from self._failure

    @property
    def failed(self) -> bool:
        """Whether the consumer has failed, so that items were dropped."""
        return self._failure is not None

    @property
    def _bytes(self) -> int:
        """Bytes of the items that are still to be consumed."""
        return self._sent_bytes - self._done_bytes

    def _sleep(self) -> None:
        """Wait for a wake-up call of the consumer."""
        with contextlib.suppress(queue.Empty):
            self._calls.get(timeout=MAX_WAIT_SECONDS)
