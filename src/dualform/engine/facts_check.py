"""Can the logged facts of a parameter be those of its optimizer? Names, types and ranges of settings, before a replay.

A step with a decay of moments of 1 would divide by zero, and one without a learning rate could not be taken again.
"""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualform.identity.families import find_optimizer_kind
from dualform.identity.families.naming import class_name
from dualform.identity.families.optimizer_kind import OptimizerKind
from dualform.identity.families.optimizer_replay import OptimizerReplay

BELOW_ONE = ("beta1", "beta2", "alpha", "rho")
"""Settings that are shares of what an average keeps: 0 <= share < 1."""
NOT_NEGATIVE = ("eps", "lr_decay", "momentum_decay", "ns_steps")
MAX_NS_STEPS = 1000
MAX_SETTING = 1e30
"""Size above which a setting is refused: a step in float32 could not take it."""


def facts_problem(optimizer: str, step: npt.NDArray[np.int64], settings: Mapping[str, npt.NDArray[Any]]) -> str:
    """Say why these cannot be the facts of a parameter that an optimizer updated; empty where they can be.

    Args:
        optimizer: the optimizer's name; of one that is not known nothing is derived, so nothing is expected.
        step: (U,) the steps in which the parameter was updated.
        settings: the logged settings by name, (U,) each.
    """
    if not len(step):
        return ""
    if (step[1:] <= step[:-1]).any():
        return "its steps do not ascend"
    kind = find_optimizer_kind(optimizer)
    if kind is None:
        return ""
    label = class_name(optimizer)
    for name, example in _example_settings(optimizer).items():
        column = settings.get(name)
        if column is None:
            return f"{label} has no {name!r}"
        dtype_kind = "O" if isinstance(example, str) else np.asarray(example).dtype.kind
        if column.dtype.kind != dtype_kind:
            return f"the {name!r} of {label} is missing or no {type(example).__name__} in some steps"
        if dtype_kind == "O" and not all(isinstance(text, str) for text in column.tolist()):
            return f"the {name!r} of {label} is missing in some steps"
        if name in kind.state_settings and column.any() and not column[0]:
            return f"{name!r} was turned on after the first step"
        if problem := _range_problem(name, column):
            return problem
    return ""


def state_problem(kind: OptimizerKind[Any], state: Mapping[str, Tensor], row: Mapping[str, Any]) -> str:
    """Say why an optimizer cannot have begun with a warm state; empty where it can.

    Args:
        kind: the optimizer.
        state: the warm entries by name; nothing for a fresh start.
        row: the settings of the parameter's first step.
    """
    if not state or not row or kind.has_coefficients:
        return ""
    trial = OptimizerReplay(kind, torch.zeros(2, 2), {})
    trial.step(kind.decode(row), torch.zeros(2, 2))
    expected = kind.warm_state(trial.state)
    if lacking := [name for name in expected if name not in state]:
        return f"the optimizer's state lacks {lacking[0]!r}"
    for name, entry in expected.items():
        found = state[name]
        if (entry.dim() == 0) != (found.numel() == 1 and found.dim() == 0):
            return f"the optimizer's {name!r} is {tuple(found.shape)}"
        if not found.is_floating_point() or (entry.dim() == 0 and not 0 <= float(found) < 2**53):
            return f"the optimizer's {name!r} is of {found.dtype}, or out of range"
    return ""


@functools.cache
def _example_settings(optimizer: str) -> Mapping[str, Any]:
    """Return settings as a known optimizer logs them, to compare names and types with."""
    kind = find_optimizer_kind(optimizer)
    assert kind is not None, "a known optimizer"
    return kind.example()


def _range_problem(name: str, column: npt.NDArray[Any]) -> str:
    if column.dtype.kind == "f" and not (np.abs(column) <= MAX_SETTING).all():
        return f"{name!r} is not finite, or larger than {MAX_SETTING:g}, in some steps"
    if name in BELOW_ONE and not ((column >= 0) & (column < 1)).all():
        return f"{name!r} is {column.min()} to {column.max()}; expected numbers from 0 to below 1"
    if name in NOT_NEGATIVE and (column < 0).any():
        return f"{name!r} is {column.min()} in a step; expected no negative number"
    if name == "ns_steps" and (column > MAX_NS_STEPS).any():
        return f"{name!r} is {column.max()} in a step; expected at most {MAX_NS_STEPS}"
    return ""
