"""What a step does to a parameter, from its gradient's history: its facts, or why it cannot be recorded exactly."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from dualform.errors import RefusedError
from dualform.recording.gradient_check import Resolution
from dualform.recording.recorded_optimizers import RecordedOptimizer
from dualform.recording.sinks import RESIDUAL, ParameterFacts


@dataclass(frozen=True, slots=True)
class StepContext:
    """What is the same for all parameters of a step."""

    exact: Collection[str]  # parameters whose gradients patterns have to explain
    graph_of: str | None  # a layer whose backward built a graph of itself
    micros: int  # backwards since the last step
    scale: float  # what the step still divides gradients by
    skipped: bool  # whether a gradient scaler makes it skip


@dataclass(frozen=True, slots=True)
class BeforeStep:
    """What is read of a parameter just before a step, without looking at a number of its gradient.

    Attributes:
        settings: the optimizer's settings for it, as they are logged.
        has_gradient: whether it has a gradient.
        attached: whether the gradient is part of a graph itself.
    """

    settings: Mapping[str, Any]
    has_gradient: bool
    attached: bool


def look_before_step(owned: RecordedOptimizer, parameter: nn.Parameter, group: Mapping[str, Any]) -> BeforeStep:
    """Look at a parameter, and at an optimizer's settings for it, just before the optimizer steps."""
    state = owned.optimizer.state.get(parameter, {})
    settings = owned.kind.encode(group, state) if owned.kind else {"lr": float(group.get("lr", "nan"))}
    gradient = parameter.grad
    return BeforeStep(settings, gradient is not None, gradient is not None and gradient.requires_grad)


def gather_facts(
    owned: RecordedOptimizer, name: str, before: BeforeStep, resolution: Resolution, context: StepContext
) -> ParameterFacts:
    """Return a parameter's facts in a step, or refuse.

    Args:
        owned: the optimizer that steps.
        name: the parameter's name.
        before: what was read just before the step.
        resolution: what was found of its gradient since the last step.
        context: what is the same for all parameters of the step.
    """
    settings = before.settings
    updated = before.has_gradient and not context.skipped
    if context.skipped:
        if owned.kind:
            owned.kind.check_skipped(settings, name)
        return ParameterFacts(name, owned.name, updated, settings, [])
    exact = name in context.exact
    if context.graph_of is not None and (before.attached or resolution.objection is not None) and exact:
        raise RefusedError(
            f"Parameter {name!r} cannot be recorded exactly: a backward through layer {context.graph_of!r} was run "
            "with create_graph=True, and gradients of gradients are not sums over patterns. Train without it, or "
            'record keys only (layers={"*": "keys"}).'
        )
    if resolution.objection is not None and exact:
        raise RefusedError(
            f"Parameter {name!r} cannot be recorded exactly: {resolution.objection}. "
            f'Remove it, or record the layer\'s keys only (layers={{...: "keys"}}).'
        )
    factors = [resolution.factors.get(micro, 0.0) / context.scale for micro in range(context.micros)]
    if resolution.residual is not None:
        if owned.kind is not None and owned.kind.rounds:
            raise RefusedError(
                f"Parameter {name!r} is trained by {owned.class_name} under autocast: its orthogonalisation makes "
                "as much of the rounding of a gradient as of the gradient. Train it outside autocast, or "
                'record the layer\'s keys only (layers={...: "keys"}).'
            )
        settings = {**settings, RESIDUAL: resolution.residual}
    return ParameterFacts(name, owned.name, updated, settings, factors)
