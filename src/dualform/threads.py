"""Threads on the CPU: operations on one alone, where waking others costs more than they save; and work side by side.

A parallel region costs tens of microseconds where waiting threads sleep, and far more where another process has the
core; an operation on a megabyte takes less than that. And several operations side by side, each on a thread of its own,
are faster than one after the other on all threads: they never wait for each other.
"""

import contextlib
import ctypes
import functools
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch

from dualform.torch_modes import call_without_autocast, keeping_grad_mode, without_gradients

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")
SMALL = 4 << 20  # bytes; what is smaller is done by one thread


class one_thread:  # a function with a generator would cost as much as what it is put around
    """Let the calling thread's operations run on itself alone while the block lasts, if they read so little."""

    __slots__ = ("_before",)

    def __init__(self, *, bytes_read: int = 0, device: torch.device | str = "cpu") -> None:
        small = bytes_read < SMALL and (device == "cpu" or torch.device(device).type == "cpu")
        self._before = torch.get_num_threads() if small else 1

    def __enter__(self) -> None:
        if self._before > 1:
            _reduced.count = self._before
            _use(1)

    def __exit__(self, *_: object) -> None:
        if self._before > 1:
            _use(self._before)
            _reduced.count = 0


_reduced = threading.local()  # count: the threads that the calling thread had before the `one_thread` block it is in


def restore_threads() -> None:
    """Give the calling thread its threads back where an interrupt kept a `one_thread` block from its end.

    Call this outside such blocks only.
    """
    count = getattr(_reduced, "count", 0)
    if count > 1:
        _use(count)
        _reduced.count = 0


def start_alone(work: Callable[[], object], *, name: str) -> threading.Thread:
    """Start a daemon thread whose operations run on itself alone."""

    def run() -> None:
        _begin_alone()
        work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def keeping_modes(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function leave grad mode and the calling thread's threads as they were, whatever was interrupted in it."""

    @keeping_grad_mode
    @functools.wraps(function)
    def kept(*args: P.args, **kwargs: P.kwargs) -> R:
        within = getattr(_reduced, "count", 0)  # not 0 in a `one_thread` block of the caller, which ends it
        try:
            return function(*args, **kwargs)
        finally:
            if not within:
                restore_threads()

    return kept


class Background:
    """Something that is being done on a thread of its own; or was, where no thread can be had any more."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work  # None once it was begun: what it holds is gone when it is done
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        try:
            self._thread = start_alone(self._run, name="dualform-background")
        except RuntimeError:  # the interpreter is ending
            self._run()

    def _run(self) -> None:
        work, self._work = self._work, None
        assert work is not None, "it is done once"
        try:
            work()
        except BaseException as error:
            self._error = error

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error, which `result` raises."""
        return self._error is not None

    def result(self) -> None:
        """Wait until it is done, and raise what it raised."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error


class InTurn:
    """Lets numbered parts of some work pass one after the other, in the order of their numbers.

    Each number has a gate of its own, a queue that is safe to interrupt; a condition is not, because Ctrl-C may come
    after its lock was taken and before the block that would free it.
    """

    def __init__(self, count: int) -> None:
        self._gates: list[queue.SimpleQueue[None]] = [queue.SimpleQueue() for _ in range(count + 1)]
        self._gates[0].put(None)
        self._broken = False

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        """Wait for this number's turn, and end it after the block; raise `Broken` if an earlier one never ends."""
        self._gates[number].get()
        if self._broken:
            raise Broken
        yield
        self._gates[number + 1].put(None)

    def give_up(self) -> None:
        """Let nobody wait any longer."""
        self._broken = True
        for gate in self._gates:
            gate.put(None)


class Broken(Exception):
    """Another thread has failed, and reports it."""


@keeping_modes
def side_by_side(items: Sequence[T], work: Callable[[T], R], then: Callable[[R], object]) -> None:
    """Do some work for every item, on as many threads as torch uses; then take the results, one at a time, in order.

    What is done with results, and in which order, does not depend on the number of threads.
    """
    count = min(torch.get_num_threads(), len(items))
    inference = torch.is_inference_mode_enabled()  # which, like autocast, is each thread's own
    if count <= 1:

        def one_by_one() -> None:
            for item in items:
                then(work(item))

        _call_plainly(one_by_one, inference=inference)
        return
    numbers, order = iter(range(len(items))), InTurn(len(items))
    taking = threading.Lock()

    def take_all() -> None:
        while True:
            with taking:
                number = next(numbers, None)
            if number is None:
                return
            found = work(items[number])
            with order.turn(number):
                then(found)
            del found  # or it would live on while the next one is made

    def loop() -> None:
        try:
            with one_thread():
                _call_plainly(take_all, inference=inference)
        except BaseException:
            order.give_up()
            raise

    helpers: list[Future[None]] = []
    with contextlib.suppress(RuntimeError):  # there are none any more when the interpreter ends
        helpers.extend(_pool(count - 1).submit(loop) for _ in range(count - 1))
    try:
        loop()
    except Broken:
        pass  # a helper says why
    finally:
        _settle(helpers)
    for helper in helpers:
        if not helper.cancelled() and (error := helper.exception()) is not None and not isinstance(error, Broken):
            raise error


def in_own_dtype(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function compute in its tensors' own dtype, whatever autocast is on around it, and keep every mode."""

    @keeping_modes
    @functools.wraps(function)
    def computed(*args: P.args, **kwargs: P.kwargs) -> R:
        on = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        return call_without_autocast(on, lambda: function(*args, **kwargs))

    return computed


@without_gradients
def _call_plainly(call: Callable[[], None], *, inference: bool) -> None:
    """Compute without graphs and in the tensors' own types."""
    if torch.is_inference_mode_enabled() == inference:
        call_without_autocast(["cpu"], call)
    else:  # on a helper thread, which no interrupt reaches
        with torch.inference_mode(inference), torch.no_grad():
            call_without_autocast(["cpu"], call)


def _settle(helpers: Sequence[Future[None]]) -> None:
    """Wait for the helpers that have begun; the others have nothing left to do."""
    for helper in helpers:
        if not helper.cancel():
            helper.exception()


@functools.cache
def _pool(size: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(size, thread_name_prefix="dualform", initializer=_begin_alone)


os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked process has none of the threads


def _begin_alone() -> None:
    torch.get_num_threads()  # which sets what a new thread has
    _use(1)


@functools.cache
def _omp() -> Callable[[int], object] | None:
    """Return OpenMP's own setter. It speaks for the calling thread; torch's speaks for all that are still to start."""
    try:
        return ctypes.CDLL(None).omp_set_num_threads
    except (AttributeError, OSError, TypeError):
        return None


def _use(count: int) -> None:
    setter = _omp()
    if setter is not None:
        setter(count)
