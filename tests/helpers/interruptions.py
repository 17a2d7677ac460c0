"""Interrupts at every place where CPython looks for them, one after the other."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

SPARED = ("<genexpr>",)  # an exception in a generator that is being closed is dropped by the interpreter


def distinct_places(action: Callable[[], object], files: tuple[str, ...]) -> list[int]:
    """Run an action; return which of its functions, counted from 1, begin where none began before.

    A place is a function and the line that calls it.
    """
    begun = 0
    seen = set()
    found = []

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal begun
        if frame.f_code.co_filename.endswith(files) and frame.f_code.co_name not in SPARED:
            begun += 1
            caller = frame.f_back
            key = (frame.f_code, caller and (caller.f_code, caller.f_lineno))
            if key not in seen:
                seen.add(key)
                found.append(begun)

    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(None)
    return found


def interrupted(action: Callable[[], object], at: int, files: tuple[str, ...] = ("",)) -> bool:
    """Run an action and interrupt it as its `at`-th Python function begins; say whether it got that far.

    Args:
        action: the action.
        at: which function, counted from 1.
        files: the ends of the names of the files whose functions count.
    """
    begun = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal begun
        if frame.f_code.co_filename.endswith(files) and frame.f_code.co_name not in SPARED:
            begun += 1
            if begun == at:
                raise KeyboardInterrupt

    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return begun >= at  # the interpreter drops an exception in what it calls where nothing can be raised
