"""A training that is walked back, from its last step to its first: what the exact derivative of its end needs.

A source whose training can start anywhere gives each step as the training took it (`PatternSource.walk_back`); what is
made of the steps is found elsewhere.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

ParameterState = Mapping[str, Any]
"""What an optimizer keeps of one parameter."""


@dataclass(frozen=True, slots=True)
class GroupUpdate:
    """What an optimizer did to one of its groups of parameters in a step.

    Attributes:
        optimizer: the optimizer's type.
        settings: the group's settings when the step was taken.
        places: the group's parameters, as places in the step's list of parameters.
    """

    optimizer: type[Optimizer]
    settings: Mapping[str, Any]
    places: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class RetracedStep:
    """One step of a training, put back to what it was just before the step.

    Attributes:
        number: the step's, counted from 0.
        names: the name of each parameter that an optimizer holds.
        parameters: these parameters before the step; the model's own, so that `losses` depends on them.
        states: what the optimizer kept of each parameter before the step.
        gradients: the gradient that the optimizer took for each parameter; None where it took none.
        updates: what the optimizers did.
        after: the parameters after the step.
        states_after: what the optimizer kept of each parameter after the step.
        buffers: the model's buffers before the step.
        columns: the columns of the step's batch.
        losses: computes the loss of each sample of the batch, (B,), whose mean the step minimised; with the generators
            of random numbers as they were, so that dropout is the same. To be called once.
        max_norm: the norm that the gradient of all parameters together was clipped to; None where it was not clipped.
    """

    number: int
    names: Sequence[str]
    parameters: Sequence[Tensor]
    states: Sequence[ParameterState]
    gradients: Sequence[Tensor | None]
    updates: Sequence[GroupUpdate]
    after: Sequence[Tensor]
    states_after: Sequence[ParameterState]
    buffers: Mapping[str, Tensor]
    columns: Mapping[str, Any]
    losses: Callable[[], Tensor]
    max_norm: float | None


VisitStep = Callable[[RetracedStep], None]
"""Looks at a step while the training is put back to it."""
