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


def gather_facts(
    owned: RecordedOptimizer,
    name: str,
    parameter: nn.Parameter,
    group: Mapping[str, Any],
    resolution: Resolution,
    context: StepContext,
) -> ParameterFacts:
    """Return a parameter's facts in the step that is about to happen, or refuse.

    Args:
        owned: the optimizer that steps.
        name: the parameter's name.
        parameter: the parameter, its gradient as the step will see it.
        group: the optimizer's settings for it.
        resolution: what was found of its gradient since the last step.
        context: what is the same for all parameters of the step.
    """
    state = owned.optimizer.state.get(parameter, {})
    settings = owned.kind.encode(group, state) if owned.kind else {"lr": float(group.get("lr", "nan"))}
    updated = parameter.grad is not None and not context.skipped
    if context.skipped:
        if owned.kind:
            owned.kind.check_skipped(settings, name)
        return ParameterFacts(name, owned.name, updated, settings, [])
    attached = parameter.grad is not None and parameter.grad.requires_grad
    exact = name in context.exact
    if context.graph_of is not None and (attached or resolution.objection is not None) and exact:
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
