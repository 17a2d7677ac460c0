"""Take the steps of one parameter again by torch's own optimizer, and move shares of the parameter along with them."""

import copy
from typing import Any

import torch
from torch import Tensor

from dualform.identity.families.optimizer_kind import OptimizerKind, ReplayedStep, Settings, State, StepMap
from dualform.torch_modes import without_gradients


class Share:
    """A part of a parameter that moves on with every step: the start's, a group's, or that of rounding."""

    def __init__(self, weight: Tensor, average: Tensor | None = None) -> None:
        self.weight = weight
        self.average = torch.zeros_like(weight) if average is None else average

    def step(self, linear: StepMap, gradient: Tensor | None) -> None:
        """Follow one step, given this share's part of the gradient (nothing for none), in float64."""
        self.weight, self.average = linear.step(self.weight, self.average, gradient)


class OptimizerReplay:
    """One parameter's training again, by torch's own optimizer, on gradients that are handed in."""

    def __init__(self, kind: OptimizerKind[Any], parameter: Tensor, state: State) -> None:
        self.kind = kind
        self.parameter = torch.nn.Parameter(parameter.clone())
        self._optimizer = kind.make(self.parameter)
        if state:
            self._optimizer.state[self.parameter].update(_cloned_state(state))

    @without_gradients
    def step(self, settings: Settings, gradient: Tensor) -> Any:
        """Take one step, and return it as a linear map (the kind's own)."""
        self.kind.restart(settings, self._optimizer.state[self.parameter])
        self._optimizer.param_groups[0].update(settings)
        self.parameter.grad = gradient
        before = _cloned_state(self._optimizer.state[self.parameter])
        self._optimizer.step()
        return self.kind.read(ReplayedStep(settings, gradient, before, self.state))

    @property
    def state(self) -> State:
        """The optimizer's state by now."""
        state: State = self._optimizer.state[self.parameter]
        return state

    def share(self) -> Share:
        """Return a copy of the parameter and its average as they are, as one share in float64."""
        average = self.state.get(self.kind.average) if self.kind.average else None
        weight = self.parameter.detach().to(torch.float64, copy=True)
        return Share(weight, None if average is None else average.to(torch.float64, copy=True))

    def copy(self) -> "OptimizerReplay":
        """Return a replay that stands where this one does."""
        return OptimizerReplay(self.kind, self.parameter.detach(), copy.deepcopy(dict(self.state)))


def _cloned_state(state: State) -> dict[str, Any]:
    return {name: entry.clone() if isinstance(entry, Tensor) else entry for name, entry in state.items()}
