"""The weights that patterns imply: what is left of the start, plus the kept patterns' shares.

`weight = start + share` (and `+ rounding`, where the optimizer rounds coarsely), each parameter summed over all layers
that use it, in float64 over float32 products. Parameters whose optimizer has coefficients are summed in any order; the
others take a fold over the steps.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualform.engine.description import LayerEntry
from dualform.engine.jobs import Executor, Pass, View, WholeView
from dualform.engine.reducers import GroupShares
from dualform.engine.shares import MaskGroup, Rounding, fold_shares, replayed_parameters
from dualform.engine.source import PatternSource
from dualform.identity.families.optimizer_facts import CoefficientsOf
from dualform.identity.parameter_use import ParameterUse
from dualform.recording.sinks import RESIDUAL


@dataclass(frozen=True, slots=True)
class ParameterParts:
    """A parameter in two parts, float64, and a third where there is a rest or the optimizer rounds coarsely."""

    start: Tensor  # what decay and momentum left of the start
    share: Tensor  # what the kept patterns added
    rounding: Rounding | None = None
    rest: Tensor | None = None  # what no pattern explains: of a run made from checkpoints, or that keeps shares
    noise: float = 0.0  # the size of what coarsely rounded gradients did beyond their patterns, at random

    @property
    def whole(self) -> Tensor:
        """The parameter: all parts together. Rounding is no pattern's, so that every view keeps it, like the start."""
        total = self.start + self.share if self.rest is None else self.start + self.share + self.rest
        return total if self.rounding is None else total + self.rounding.term


def parts(
    source: PatternSource, view: View, executor: Executor, *, layers: Collection[str] | None = None
) -> dict[str, ParameterParts]:
    """Return start and share of each parameter of these layers in a view; by default of all layers with values.

    The patterns are read. Parameters of layers that keep shares alone are not among the default.
    """
    if layers is None:
        layers = layers_with_values(source)
    horizon = view.horizon
    scalar = shares(source, view, executor, layers=layers)
    found = {
        name: ParameterParts(
            start(source, name, horizon=horizon),
            share,
            rest=source.unexplained(name, horizon),
            noise=coefficient_noise(source, name, horizon),
        )
        for name, share in scalar.items()
    }
    if replayed_parameters(source, layers):
        fold = fold_shares(source, layers, horizon=horizon, groups=1, by=MaskGroup(view.mask))
        for name, outcome in executor.run(source, [fold])[0].items():
            rest = source.unexplained(name, horizon)
            found[name] = ParameterParts(outcome.start, outcome.shares[0], outcome.rounding, rest, outcome.noise)
    return found


def layers_with_values(source: PatternSource) -> list[str]:
    """Return the layers whose values are kept, so that their parameters can be rebuilt from patterns."""
    shared = set(source.shared_parameters())
    return [
        name
        for name, entry in source.layers.items()
        if entry.has_values and not shared & set(entry.parameters.values())
    ]


def coefficient_noise(source: PatternSource, parameter: str, horizon: int) -> float:
    """Return the root of the sum of squares of what each step's residual did to a parameter with coefficients."""
    facts, _ = source.facts(parameter)
    if RESIDUAL not in facts.settings:
        return 0.0
    residual = np.nan_to_num(np.asarray(facts.settings[RESIDUAL], dtype=np.float64))
    within = facts.step < horizon
    coefficients = source.coefficients(parameter, horizon)[0].step[facts.step[within]]
    return float(np.linalg.norm(coefficients * residual[within]))


def start(source: PatternSource, parameter: str, *, horizon: int, of: CoefficientsOf = "parameter") -> Tensor:
    """Return what `horizon` steps left of the start of a parameter that has coefficients, in float64."""
    found, _ = source.coefficients(parameter, horizon, of)
    left = found.start * source.initial[parameter].double()
    buffer = source.initial_states.get(parameter, {}).get("momentum_buffer")
    return left if buffer is None else left + found.buffer * buffer.double()


def shares(
    source: PatternSource, view: View, executor: Executor, *, layers: Collection[str], of: CoefficientsOf = "parameter"
) -> dict[str, Tensor]:
    """Return the kept patterns' share of each parameter that has coefficients (or of its buffer), in float64."""
    total: dict[str, Tensor] = {}
    jobs: list[Pass[dict[ParameterUse, Tensor]]] = []
    for layer in layers:
        entry = source.require_values(layer)
        uses = [use for use in entry.uses if not source.is_replayed(use.parameter)]
        shapes = {use: source.description.parameters[use.parameter].shape for use in uses}
        for use, shape in shapes.items():
            total.setdefault(use.parameter, torch.zeros(shape, dtype=torch.float64))
        if uses:
            like = torch.empty(0, dtype=_dtype(entry))
            jobs.append(Pass(layer, view, GroupShares(1, shapes), like, values=True, coefficients_of=of))
    for found in executor.run(source, jobs):
        for use, share in found.items():
            total[use.parameter] += share[0]
    return total


def _dtype(entry: LayerEntry) -> torch.dtype:
    return torch.float64 if entry.dtype == "float64" else torch.float32


def states(source: PatternSource, executor: Executor, *, horizon: int) -> dict[str, dict[str, Tensor]]:
    """Return the optimizer state that the patterns imply after `horizon` steps: parameter -> entry -> tensor."""
    layers = layers_with_values(source)
    buffers = shares(source, WholeView(source, horizon), executor, layers=layers, of="buffer")
    found = {
        name: {"momentum_buffer": start(source, name, horizon=horizon, of="buffer") + share}
        for name, share in buffers.items()
    }
    for name in found:  # a parameter that no step touched has the state that it had, whatever the optimizer
        if not len(source.facts(name)[0].step):
            found[name] = {entry: tensor.double() for entry, tensor in source.initial_states.get(name, {}).items()}
    if replayed_parameters(source, layers):
        fold = fold_shares(source, layers, horizon=horizon, groups=0)
        for name, outcome in executor.run(source, [fold])[0].items():
            found[name] = {e: t.double() for e, t in outcome.state.items() if isinstance(t, Tensor)}
    return found
