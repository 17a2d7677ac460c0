"""Modes of torch are put back wherever an interrupt comes: where a Python function begins, CPython looks for them."""

from collections.abc import Callable

import pytest
import torch

from dualform.threads import in_own_dtype, side_by_side
from dualform.torch_modes import (
    call_without_autocast,
    keeping_grad_mode,
    with_gradients,
    without_filling,
    without_gradients,
)
from helpers.interruptions import interrupted


def count_lost(action: Callable[[], object], *, most: int = 200) -> int:
    """Interrupt an action at the beginning of each of its functions; return how often a mode of torch was lost."""
    lost = 0
    for at in range(1, most):
        reached = interrupted(action, at)
        lost += not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
        torch.set_grad_enabled(True)
        torch.set_autocast_enabled("cpu", False)
        if not reached:
            assert at > 2, "some functions were interrupted"
            return lost
    raise AssertionError("the action never came to its end")


def work() -> None:
    """Do something that has functions to be interrupted in."""
    for _ in range(3):
        helper()


def helper() -> None:
    torch.ones(2).sum()


def with_torchs_own() -> None:
    with torch.no_grad():
        work()


def test_torchs_own_no_grad_does_not_survive_every_interrupt() -> None:
    """Why this module is there; and that the test below can fail."""
    assert count_lost(with_torchs_own) > 0


@pytest.mark.parametrize(
    "action",
    [
        without_gradients(work),
        with_gradients(work),
        keeping_grad_mode(with_torchs_own),
        in_own_dtype(with_torchs_own),
        lambda: call_without_autocast(["cpu", "cuda"], work),
        lambda: without_filling(work),
        lambda: side_by_side([1, 2, 3], lambda _: helper(), lambda _: None),
    ],
)
def test_modes_survive_an_interrupt_at_the_beginning_of_every_function(action: Callable[[], object]) -> None:
    assert count_lost(action) == 0


def test_the_modes_inside() -> None:
    assert without_gradients(torch.is_grad_enabled)() is False
    with torch.no_grad():
        assert with_gradients(torch.is_grad_enabled)() is True
        assert keeping_grad_mode(torch.is_grad_enabled)() is False
        assert not torch.is_grad_enabled()
    with torch.autocast("cpu"):
        assert call_without_autocast(["cpu"], lambda: torch.is_autocast_enabled("cpu")) is False
        assert without_filling(torch._C._get_deterministic_fill_uninitialized_memory) is False
        assert torch._C._get_deterministic_fill_uninitialized_memory()
        assert torch.is_autocast_enabled("cpu")
