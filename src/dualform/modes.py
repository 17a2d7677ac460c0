"""Evaluation mode for the length of a question, without a call of any method that the user's classes may override.

Only the `training` flags are set. `model.eval()` would call `train(False)`, which some models define with another
meaning or signature, and which may do more than set flags.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module of a model into evaluation mode, and each back into its own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        set_evaluation(model)
        yield
    finally:
        try:
            _set_modes(modes)
        finally:
            _set_modes(modes)  # once more: an interrupt may have cut the first short


def _set_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, mode in modes:
        module.training = mode


def set_evaluation(model: nn.Module) -> None:
    """Put every module of a model into evaluation mode, for good."""
    for module in model.modules():
        module.training = False


def evaluation_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model that is in evaluation mode; the model itself keeps its modes."""
    copied = copy.deepcopy(model)
    set_evaluation(copied)
    return copied
