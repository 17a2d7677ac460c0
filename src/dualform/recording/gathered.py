"""Divided parameters with the rows of all processes, for a sink that folds shares of whole parameters.

Gradients and the optimizer's states are gathered over the group that the model itself is divided over. Every process
has to come here for the same parameters, when all of them know that none has failed in this step so far.
"""

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from dualform.recording.divided import OwnRows
from dualform.recording.recorded_optimizers import RecordedOptimizer
from dualform.recording.sharded_modules import is_divided
from dualform.recording.sinks import GatheredParameter


class WholeParameter:
    """What a sink looks at of a parameter besides its numbers: the gradient with all rows, its size and its place."""

    def __init__(self, rows: OwnRows, gradient: Tensor) -> None:
        self.grad = gradient
        self.device = rows.device
        self.nbytes = rows.whole.numel() * rows.element_size()
        self._axes = len(rows.whole)

    def dim(self) -> int:
        """Return the number of axes."""
        return self._axes


def gather_before(
    owned: RecordedOptimizer, own_rows: Mapping[str, OwnRows], scale: float, *, first: bool
) -> dict[str, GatheredParameter]:
    """Return divided parameters as a step is about to find them.

    Args:
        owned: their optimizer.
        own_rows: this process's rows of those of its parameters that have a gradient.
        scale: what the step still divides gradients by.
        first: whether nothing was gathered before, so that the optimizer's average is not known.
    """
    found = {}
    for name, rows in own_rows.items():
        gradient = rows.divided.grad
        assert gradient is not None, "a divided parameter has a gradient in all processes, or in none"
        holder = cast("nn.Parameter", WholeParameter(rows, _whole(gradient)))
        wanted = owned.kind.overwrites_state if owned.kind is not None else ()
        if first and owned.kind is not None and owned.kind.average is not None:
            wanted = (*wanted, owned.kind.average)
        found[name] = GatheredParameter(holder, owned.optimizer, scale)
        found[name].keep(_gathered(owned.optimizer.state.get(rows.divided, {}), wanted))
    return found


def gather_after(live: Mapping[str, Any], own_rows: Mapping[str, OwnRows]) -> None:
    """Gather the states that a step has left of the divided parameters that `gather_before` gave."""
    for name, one in live.items():
        if isinstance(one, GatheredParameter):
            state = one.optimizer.state.get(own_rows[name].divided, {})
            one.keep(_gathered(state, sorted(state)))


def _gathered(state: Mapping[str, Any], wanted: Iterable[str]) -> dict[str, Any]:
    return {name: _whole(state[name]) for name in wanted if name in state}


def _whole(entry: Any) -> Any:
    """Return a tensor with the rows of all processes; anything else as it is."""
    if not is_divided(entry):
        return entry
    found: Tensor = cast("Any", entry.detach()).full_tensor()
    return found.detach() if type(found) is torch.Tensor else torch.as_tensor(found)
