"""Work side by side gives what work one after the other gives, in the same order; and threads are left as they were."""

import threading
import time

import pytest
import torch

from dualform.threads import (
    SMALL,
    Broken,
    InTurn,
    keeping_modes,
    one_thread,
    restore_threads,
    side_by_side,
    start_alone,
)


@pytest.fixture(params=[1, 2, 4])
def threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_results_are_taken_in_order_one_at_a_time(threads: int) -> None:
    taken: list[int] = []
    inside: list[int] = []

    def work(item: int) -> int:
        time.sleep(0.002 * (item % 3))  # later items are often done first
        return item * item

    def take(result: int) -> None:
        inside.append(1)
        assert len(inside) == 1, "two at a time"
        taken.append(result)
        inside.pop()

    side_by_side(range(40), work, take)
    assert taken == [item * item for item in range(40)]
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("where", ["work", "take"])
def test_a_failure_is_raised_and_nobody_waits_for_it(threads: int, where: str) -> None:
    def fail(stage: str, item: int) -> int:
        if stage == where and item == 7:
            raise ValueError("item 7")
        return item

    with pytest.raises(ValueError, match="item 7"):
        side_by_side(range(40), lambda item: fail("work", item), lambda item: fail("take", item))
    side_by_side(range(5), lambda item: item, lambda item: None)  # and the threads still work
    assert torch.get_num_threads() == threads


def test_several_callers_share_the_threads(threads: int) -> None:
    results: dict[int, list[int]] = {}

    def call(name: int) -> None:
        found: list[int] = []
        side_by_side(range(30), lambda item: item + name, found.append)
        results[name] = found

    callers = [threading.Thread(target=call, args=(name,)) for name in range(5)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(30)
    assert results == {name: [item + name for item in range(30)] for name in range(5)}


def test_workers_build_no_graphs() -> None:
    weight = torch.ones(3, requires_grad=True)
    found: list[bool] = []
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        side_by_side(range(4), lambda _: (weight * 2).requires_grad, found.append)
    finally:
        torch.set_num_threads(before)
    assert not any(found)


def test_one_thread_is_used_only_for_what_is_small() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with one_thread():
            small = torch.get_num_threads()
            with pytest.raises(KeyError), one_thread():
                raise KeyError
        with one_thread(bytes_read=SMALL):
            large = torch.get_num_threads()
        with one_thread(device=torch.device("meta")):
            elsewhere = torch.get_num_threads()
        assert (large, elsewhere, torch.get_num_threads()) == (3, 3, 3)
        assert small in (1, 3)  # 3 where OpenMP cannot be asked
        seen: list[int] = []
        with one_thread():
            started = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
            started.start()
            started.join()
        assert seen == [3], "what other threads have is theirs"
        start_alone(lambda: seen.append(torch.get_num_threads()), name="test").join()
        assert seen[1] == small
    finally:
        torch.set_num_threads(before)


def test_threads_come_back_after_a_block_that_never_ended() -> None:
    """Ctrl-C may come as the end of the block begins."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        one_thread().__enter__()
        assert torch.get_num_threads() == 1
        restore_threads()
        assert torch.get_num_threads() == 3
        restore_threads()
        torch.set_num_threads(2)
        restore_threads()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_an_interrupt_while_waiting_for_a_turn_leaves_nobody_waiting() -> None:
    """The calling thread holds nothing then that a helper would wait for."""
    order = InTurn(3)

    def wait() -> None:
        with pytest.raises(Broken), order.turn(2):
            pass

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    with order.turn(0):
        pass
    with pytest.raises(KeyboardInterrupt), order.turn(1):
        raise KeyboardInterrupt
    waiting.join(0.05)
    assert waiting.is_alive()
    order.give_up()
    waiting.join(10)
    assert not waiting.is_alive()
    with pytest.raises(Broken), order.turn(1):
        pass


def test_a_function_that_keeps_modes_gives_threads_back() -> None:
    @keeping_modes
    def interrupted() -> None:
        one_thread().__enter__()
        raise KeyboardInterrupt

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert torch.get_num_threads() == 3
        with one_thread():
            keeping_modes(lambda: None)()
            assert torch.get_num_threads() == 1, "the block around it goes on"
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
