"""Consent to long work: a question that would run a whole training again can be made to ask first.

A program that asks a memory has decided to wait. A page that shows many panels has not: there a question that needs a
replay is refused with `ReplayNeededError`, which says about how long it would take, until somebody wants it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_asks_first: ContextVar[bool] = ContextVar("asks_first", default=False)


@contextmanager
def asking_before_replays(asks: bool = True) -> Iterator[None]:
    """Refuse, in this block and thread, questions that need a replay of the training; with False, allow them."""
    token = _asks_first.set(asks)
    try:
        yield
    finally:
        _asks_first.reset(token)


def asks_before_replays() -> bool:
    """Say whether a question that needs a replay is to be refused here."""
    return _asks_first.get()
