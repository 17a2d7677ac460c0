"""The calling thread's modes of torch, put back to what they were even where Ctrl-C comes at the worst moment.

`with torch.no_grad():` is left by a Python function, and an interrupt at the first instruction of that function leaves
gradients off for the rest of the program. CPython looks for interrupts when a Python function begins, when a loop jumps
back and after a call; it does not between the beginning of a `finally` block and the end of its first call of a C
function. So each mode is put back here by one C function, called first in a `finally` block. A clean-up that takes a
Python function is written twice, `try: clean_up() finally: clean_up()`, and may be done twice.
"""

import functools
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack

R = TypeVar("R")
P = ParamSpec("P")
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled


def keeping_grad_mode(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function leave grad mode as it was when it was called, whatever was interrupted inside it."""
    return _in_grad_mode(function, None)


def without_gradients(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function build no graphs, as `torch.no_grad` does."""
    return _in_grad_mode(function, False)


def with_gradients(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function build graphs, as `torch.enable_grad` does."""
    return _in_grad_mode(function, True)


def _in_grad_mode(function: Callable[P, R], enabled: bool | None) -> Callable[P, R]:
    """Let a function begin with grad mode on or off (None: as it is), and leave it as it was."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        before = torch.is_grad_enabled()
        try:
            if enabled is not None:
                set_grad_enabled(enabled)
            return function(*args, **kwargs)
        finally:
            set_grad_enabled(before)

    return called


def call_without_autocast(kinds: Sequence[str], call: Callable[[], R]) -> R:
    """Call a function with autocast off for these kinds of devices.

    Unlike `torch.autocast(kind, enabled=False)` this does not count as one more region of autocast: a count that an
    interrupt left behind would keep torch from ever emptying its cache of cast weights.
    """
    if not kinds:
        return call()
    before = torch.is_autocast_enabled(kinds[0])
    try:
        torch.set_autocast_enabled(kinds[0], False)
        return call_without_autocast(kinds[1:], call)
    finally:
        torch.set_autocast_enabled(kinds[0], before)


def without_filling(call: Callable[[], R]) -> R:
    """Call a function whose new tensors are not filled before they are written to.

    Where torch is deterministic it fills them, against programs that read what nobody has written; a copy costs twice
    as much by it.
    """
    before = torch._C._get_deterministic_fill_uninitialized_memory()
    try:
        torch._C._set_deterministic_fill_uninitialized_memory(False)
        return call()
    finally:
        torch._C._set_deterministic_fill_uninitialized_memory(before)


def function_modes() -> int:
    """Return how many modes of the calling thread (`TorchFunctionMode`) torch's functions go through."""
    return len(_get_current_function_mode_stack())


def end_function_modes(count: int) -> None:
    """End the modes beyond the first `count`, which an interrupt kept from their end."""
    while function_modes() > count:
        torch._C._pop_torch_function_stack()
