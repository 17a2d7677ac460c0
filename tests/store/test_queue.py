"""The queue between training and writing: bounded in bytes, in order, and honest when it breaks."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from dualform.errors import StoreError
from dualform.store.queue import ByteQueue

SOON = 5.0  # seconds that nothing here should take


def in_background(action: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


def finished(thread: threading.Thread, within: float = SOON) -> bool:
    thread.join(within)
    return not thread.is_alive()


def waits(thread: threading.Thread) -> bool:
    return not finished(thread, 0.05)


@pytest.fixture
def queue() -> Iterator[ByteQueue[int]]:
    made: ByteQueue[int] = ByteQueue(100)
    yield made
    made.fail(RuntimeError("over"))  # lets every thread go


def test_items_come_out_in_order_and_end_with_close(queue: ByteQueue[int]) -> None:
    for i in range(5):
        queue.put(i, 20)
    queue.close()
    assert list(queue) == [0, 1, 2, 3, 4]


def test_a_full_queue_makes_the_producer_wait_until_there_is_room(queue: ByteQueue[int]) -> None:
    queue.put(0, 60)
    queue.put(1, 40)
    producer = in_background(lambda: queue.put(2, 1))
    assert waits(producer)
    items = iter(queue)
    assert next(items) == 0
    assert waits(producer), "an item counts while it is being worked on"
    assert next(items) == 1
    assert finished(producer)


def test_never_more_bytes_are_held_than_the_limit_with_a_slow_consumer() -> None:
    queue: ByteQueue[int] = ByteQueue(100)
    held: list[int] = []
    lock = threading.Lock()
    worst = 0

    def consume() -> None:
        for _ in queue:
            time.sleep(0.002)
            with lock:
                held.pop()  # counted out before the queue lets go of it, so `worst` is never too small

    consumer = in_background(consume)
    for i in range(40):
        queue.put(i, 30)
        with lock:
            held.append(30)
            worst = max(worst, sum(held))
    queue.close()
    assert finished(consumer)
    assert 60 <= worst <= 120  # three of 30 fit in 100; one more may be counted between put and append


def test_an_item_larger_than_the_limit_passes_alone(queue: ByteQueue[int]) -> None:
    queue.put(0, 1000)
    producer = in_background(lambda: queue.put(1, 1000))
    assert waits(producer)
    items = iter(queue)
    assert next(items) == 0
    second = in_background(lambda: next(items))
    assert finished(producer)
    assert finished(second)


def test_join_waits_for_the_item_in_hand(queue: ByteQueue[int]) -> None:
    queue.put(0, 1)
    items = iter(queue)
    next(items)
    joiner = in_background(queue.join)
    assert waits(joiner)
    queue.close()
    assert next(items, None) is None
    assert finished(joiner)


def test_a_failure_is_raised_by_whoever_waits_and_by_everyone_after(queue: ByteQueue[int]) -> None:
    caught: list[StoreError] = []

    def put() -> None:
        try:
            queue.put(1, 100)
        except StoreError as error:
            caught.append(error)

    queue.put(0, 100)
    producer = in_background(put)
    assert waits(producer)
    queue.fail(OSError("disk full"))
    assert finished(producer)
    assert "disk full" in str(caught[0])
    assert isinstance(caught[0].__cause__, OSError)
    for action in (lambda: queue.put(2, 1), queue.join, queue.check):
        with pytest.raises(StoreError, match="disk full"):
            action()


def test_a_failure_ends_an_idle_consumer(queue: ByteQueue[int]) -> None:
    consumer = in_background(lambda: list(queue))
    assert waits(consumer)
    queue.fail(RuntimeError("stop"))
    assert finished(consumer)


def test_a_failure_while_an_item_is_in_hand_ends_the_consumer_in_order(queue: ByteQueue[int]) -> None:
    queue.put(0, 1)
    queue.put(1, 1)
    items = iter(queue)
    assert next(items) == 0
    queue.fail(RuntimeError("stop"))
    assert next(items, None) is None


def test_the_message_is_one_sentence_after_another(queue: ByteQueue[int]) -> None:
    queue.fail(OSError(28, "No space left on device"))
    with pytest.raises(StoreError) as caught:
        queue.check()
    assert "No space left on device. What was published before stays readable." in str(caught.value)
    assert "\n" not in str(caught.value)


def interrupted(action: Callable[[], object], at: int) -> bool:
    """Run an action and interrupt it before its `at`-th line inside the queue; say whether it got that far."""
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.endswith("store/queue.py"):
            return None
        if event == "line":
            lines += 1
            if lines == at:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize("full", [False, True])
def test_an_interrupt_anywhere_in_put_or_join_leaves_a_queue_that_ends(full: bool) -> None:
    """A producer that is interrupted at any line can still wait for the rest and close."""
    for begin in ("put", "join"):
        for at in range(1, 40):
            queue: ByteQueue[int] = ByteQueue(10)
            taken: list[int] = []

            def consume(queue: ByteQueue[int] = queue, taken: list[int] = taken) -> None:
                for item in queue:
                    time.sleep(0.002 if full else 0)
                    taken.append(item)

            consumer = in_background(consume)
            queue.put(0, 10)
            action = (lambda queue=queue: queue.put(1, 10)) if begin == "put" else queue.join
            reached = interrupted(action, at)
            queue.put(2, 1)
            closing = in_background(queue.join)
            assert finished(closing), (begin, at)
            assert taken[-1] == 2, "join waits for everything that was put"
            queue.close()
            assert finished(consumer), (begin, at)
            if not reached:
                break
        assert at > 3, "some lines were interrupted"


def test_joining_a_queue_whose_consumer_has_ended_returns(queue: ByteQueue[int]) -> None:
    queue.close()
    assert list(queue) == []
    queue.put(1, 1000)
    assert finished(in_background(queue.join))
