"""What a step does to a parameter, from its gradient's history: its facts, or why it cannot be recorded exactly."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

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


class BeforeStep(NamedTuple):
    """What is read of a parameter just before a step, without looking at a number of its gradient.

    Attributes:
        settings: the optimizer's settings for it, as they are logged.
        has_gradient: whether it has a gradient.
        attached: whether the gradient is part of a graph itself.
    """

    settings: Mapping[str, Any]
    has_gradient: bool
    attached: bool


def look_before_step(owned: RecordedOptimizer) -> dict[str, BeforeStep]:
    """Look at an optimizer's covered parameters, and at its settings for each, just before it steps."""
    found = {}
    mine = owned.parameters
    for group, names in zip(owned.optimizer.param_groups, owned.names_by_group, strict=True):
        parameters = [mine[name] for name in names]
        settings: Iterable[Mapping[str, Any]]
        if owned.kind is None:
            settings = [{"lr": float(group.get("lr", "nan"))}] * len(names)
        else:
            settings = owned.kind.encode_all(group, owned.optimizer.state, parameters)
        for name, parameter, one in zip(names, parameters, settings, strict=True):
            gradient = parameter.grad
            found[name] = BeforeStep(one, gradient is not None, gradient is not None and gradient.requires_grad)
    return found


def gather_all_facts(
    owned: RecordedOptimizer,
    before: Mapping[str, BeforeStep],
    resolutions: Iterable[Resolution],
    context: StepContext,
) -> list[ParameterFacts]:
    """Return the facts of all parameters of an optimizer in a step, or refuse; as `gather_facts` does for each."""
    usual = not context.skipped and context.graph_of is None and context.micros == 1
    optimizer, scale, facts = owned.name, context.scale, []
    last: Resolution | None = None
    factors: list[float] = []
    for (name, (settings, has_gradient, _)), resolution in zip(before.items(), resolutions, strict=True):
        if usual and resolution.objection is None and resolution.residual is None:
            if resolution is not last:
                factors, last = [resolution.factors.get(0, 0.0) / scale], resolution
            facts.append(ParameterFacts(name, optimizer, has_gradient, settings, factors))
        else:
            facts.append(gather_facts(owned, name, before[name], resolution, context))
    return facts


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
