"""Second moments of a layer's keys and values, as the rates weigh them: what the filter of effects is made of.

    T = sum_s rate_s        A = (1/T) sum_s (rate_s / n) sum x xᵀ        G = (1/T) sum_s rate_s N sum w e eᵀ

Step s has n patterns of this layer; N counts the terms of its loss, which is a mean over them (`losses.py`,
where w comes from too). Every pattern adds its own terms, so parts of a memory may be summed apart and merged in any
order.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualform.effects.losses import Losses
from dualform.effects.rates import Rates, trained_uses
from dualform.engine.block import Block
from dualform.engine.jobs import Executor, Pass, WholeView
from dualform.engine.reducers import Reducer
from dualform.engine.source import PatternPart, PatternSource
from dualform.errors import QueryError

WIDEST = 8192  # of a layer whose moments are worth having


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Sums over a layer's patterns, float64."""

    keys: Tensor  # (d_in, d_in), T times A
    values: Tensor  # (d_out, d_out), T times G
    time: float  # T
    decay: float


@dataclass(frozen=True, slots=True, eq=False)
class MomentSums(Reducer[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]):
    """The weighted second moments of (extended) keys and of values.

    Attributes:
        on_keys: (T,) rate / n of each pattern's step.
        on_values: (T,) rate · N · w of each pattern.
        extend: how biases extend keys.
        shape: d_out and the width of extended keys.
    """

    on_keys: Tensor
    on_values: Tensor
    extend: "Extended"
    shape: tuple[int, int]
    needs_all_threads = True

    def new(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return zeros."""
        d_out, width = self.shape
        return tuple(torch.zeros(d, d, dtype=torch.float64) for d in (width, d_out))  # type: ignore[return-value]

    def add(
        self, state: tuple[Tensor, Tensor], block: Block, measures: Tensor, groups_of: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Add a block's moments."""
        assert block.values is not None, "this pass reads values"
        at = block.pattern_ids
        pairs = ((self.extend(block.keys), self.on_keys[at]), (block.values, self.on_values[at]))
        for total, (rows, weights) in zip(state, pairs, strict=True):
            scaled = rows * weights.sqrt().to(rows.dtype)[:, None]
            total += scaled.T @ scaled
        return state

    def merge(self, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Add the moments."""
        return first[0] + second[0], first[1] + second[1]

    def result(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the moments of keys and of values."""
        return state


def outside(run: PatternSource, layer: str) -> str | None:
    """Say why a layer has no effects: its patterns are not kept, it is outside the linear family, or too wide.

    Nothing where it may have them.
    """
    entry = run.layer(layer)
    if entry.store == "shares":
        return f"its patterns are not kept; record them too, keep=[..., dualform.Patterns(layers={layer!r})]"
    if not is_linear(run, layer):
        return f"{entry.kind} is not of the linear family"
    if max(entry.d_in, entry.d_out) > WIDEST:
        return f"{entry.d_in} -> {entry.d_out} is wider than {WIDEST}"
    return None


def is_linear(run: PatternSource, layer: str) -> bool:
    """Say whether a layer is of the linear family, z = W x (+ b), with whole values."""
    return all(use.parameter_map.is_affine for use in run.layer(layer).uses)


@dataclass(frozen=True, slots=True)
class Extended:
    """How a layer's keys are extended by its biases: each that was trained is one more key of 1."""

    weight: bool
    biases: int

    def __call__(self, keys: Tensor) -> Tensor:
        """Return keys or queries (n, d_in) as (n, d_in + biases); without the keys where the weight was not trained."""
        ones = keys.new_ones(len(keys), self.biases)
        return torch.cat([keys, ones], dim=1) if self.weight else ones

    def width(self, d_in: int) -> int:
        """Return how wide an extended key is."""
        return (d_in if self.weight else 0) + self.biases


def extension(run: PatternSource, layer: str, *, horizon: int) -> Extended:
    """Return how a layer's keys are extended."""
    uses = trained_uses(run, layer, horizon=horizon)
    biases = sum(use.parameter_map.is_bias for use in uses)
    return Extended(len(uses) > biases, biases)


def pattern_factors(run: PatternSource, layer: str, part: PatternPart, rates: Rates) -> npt.NDArray[np.float64]:
    """Return what rescaled the gradient of each of a layer's patterns in a part between backward and step."""
    trained = trained_uses(run, layer, horizon=len(rates.rate))
    first = next((use for use in trained if not use.parameter_map.is_bias), trained[0])
    address = part.addresses(layer)
    _, factors = run.facts(first.parameter)
    return np.asarray(factors[address["step"], address["micro"]])


def pattern_rates(run: PatternSource, layer: str, part: PatternPart, rates: Rates) -> npt.NDArray[np.float64]:
    """Return the rate of each of a layer's patterns in a part: its step's, times its factor; 0 after the horizon."""
    step = part.addresses(layer)["step"]
    within = step < len(rates.rate)
    each = rates.rate[np.where(within, step, 0)] * pattern_factors(run, layer, part, rates)
    return np.where(within, each, 0.0)


def find_moments(source: PatternSource, executor: Executor, layer: str, rates: Rates, losses: Losses) -> Moments:
    """Add up a layer's moments over all its patterns within the rates' horizon."""
    horizon = len(rates.rate)
    entry = source.require_values(layer)
    extend = extension(source, layer, horizon=horizon)
    weights = [_moment_weights(source, layer, part, rates, losses) for part in source.parts() if part.start < horizon]
    on_keys, on_values, decay = (torch.from_numpy(np.concatenate(each)) for each in zip(*weights, strict=True))
    reducer = MomentSums(on_keys, on_values, extend, (entry.d_out, extend.width(entry.d_in)))
    like = torch.empty(0, dtype=torch.float64 if entry.dtype == "float64" else torch.float32)
    job = Pass(layer, WholeView(source, horizon), reducer, like, values=True)
    keys, values = executor.run(source, [job])[0]
    for what, moment in (("keys", keys), ("values", values)):
        if not bool(torch.isfinite(moment).all()):
            raise QueryError(
                f"Layer {layer!r} holds {what} that are not finite, or too large to be squared: the training diverged. "
                "There are no effects; look at an earlier memory.at(step=...)."
            )
    return Moments(keys, values, float(on_keys.sum()), float(decay.sum()))


def _moment_weights(
    source: PatternSource, layer: str, part: PatternPart, rates: Rates, losses: Losses
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return rate / n, rate · N · w and the part of what weight decay takes, for each of a layer's patterns, (n,).

    All of them are 0 for patterns after the rates' horizon.
    """
    step = part.addresses(layer)["step"]
    within = step < len(rates.rate)
    each = np.abs(pattern_rates(source, layer, part, rates))
    count = np.bincount(step)[step]  # n
    weights, terms = losses.of(part, layer)
    on_keys, on_values = each / count, each * terms * weights
    if losses.scaled:  # the factor belongs to the value and not to the rate
        factors = pattern_factors(source, layer, part, rates)
        on_keys = np.divide(on_keys, factors, out=np.zeros_like(on_keys), where=factors != 0)
        on_values = on_values * factors
    return on_keys, on_values, np.where(within, rates.decay[np.where(within, step, 0)], 0.0) / count
