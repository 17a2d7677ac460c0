"""How many threads torch's operations on the CPU use: one, where waking others costs more than they would save.

A parallel region costs tens of microseconds where waiting threads sleep, and far more where another process has the
core; an operation on a megabyte takes less than that. Threads that work side by side use one each, too.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

SMALL = 4 << 20  # bytes; what is smaller is done by one thread


@contextmanager
def one_thread(*, bytes_read: int = 0, device: torch.device | str = "cpu") -> Iterator[None]:
    """Let the calling thread's operations run on itself alone while the block lasts, if they read so little."""
    before = torch.get_num_threads()
    if before == 1 or bytes_read >= SMALL or torch.device(device).type != "cpu":
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def start_alone(work: Callable[[], object], *, name: str) -> threading.Thread:
    """Start a daemon thread whose operations run on itself alone."""
    ready = threading.Event()

    def run() -> None:
        torch.set_num_threads(1)
        ready.set()
        work()

    before = torch.get_num_threads()
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    ready.wait()
    torch.set_num_threads(before)  # what torch gives to threads that are started from now on
    return thread
