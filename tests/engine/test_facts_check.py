"""Facts that cannot be those of an optimizer: what each optimizer itself says of its settings."""

from typing import Any

import numpy as np
import pytest
import torch

from dualform.engine.facts_check import facts_problem
from dualform.identity.families import optimizer_kinds

STEP = np.arange(3)


def columns(optimizer: type[torch.optim.Optimizer], **changed: list[Any]) -> dict[str, np.ndarray]:
    """Return the settings of three steps as an optimizer logs them, some of them changed."""
    example = optimizer_kinds()[optimizer].example()
    kinds = {name: object if isinstance(value, str) else None for name, value in example.items()}  # as a table has it
    return {name: np.array(changed.get(name, [value] * 3), dtype=kinds[name]) for name, value in example.items()}


@pytest.mark.parametrize("optimizer", optimizer_kinds(), ids=lambda optimizer: optimizer.__name__)
def test_an_optimizers_own_example_is_no_problem(optimizer: type[torch.optim.Optimizer]) -> None:
    for name in (optimizer.__name__, f"torch.optim:{optimizer.__name__}"):
        assert facts_problem(name, STEP, columns(optimizer)) == ""


@pytest.mark.parametrize(
    ("optimizer", "setting", "values"),
    [
        (torch.optim.RMSprop, "momentum", [0.0, 0.9, 0.9]),
        (torch.optim.RMSprop, "centered", [False, True, True]),
        (torch.optim.Adam, "amsgrad", [False, False, True]),
        (torch.optim.AdamW, "amsgrad", [False, True, True]),
    ],
)
def test_a_setting_that_makes_state_cannot_be_turned_on_later(
    optimizer: type[torch.optim.Optimizer], setting: str, values: list[Any]
) -> None:
    name = optimizer.__name__
    assert facts_problem(name, STEP, columns(optimizer, **{setting: values})) == (
        f"{setting!r} was turned on after the first step"
    )
    assert facts_problem(name, STEP, columns(optimizer, **{setting: [values[-1]] * 3})) == ""


def test_sgd_may_turn_momentum_on_later_and_others_optimizers_may_do_anything() -> None:
    assert facts_problem("SGD", STEP, columns(torch.optim.SGD, momentum=[0.0, 0.9, 0.9])) == ""
    assert facts_problem("mine:RMSprop", STEP, {}) == ""
    assert facts_problem("RMSprop", STEP, {}) == "RMSprop has no 'lr'"
