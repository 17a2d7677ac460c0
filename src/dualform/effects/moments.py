"""Second moments of a layer's keys and values, as the rates weigh them: what the filter of effects is made of.

    T = sum_s rate_s        A = (1/T) sum_s (rate_s / n) sum x xᵀ        G = (1/T) sum_s rate_s N sum w e eᵀ

Step s has n patterns of this layer; N counts the terms of its loss, which is a mean over them (`losses.py`,
where w comes from too). Every pattern adds its own terms, so parts of a memory may be summed apart and merged in any
order.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

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

R = TypeVar("R")
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


@dataclass(frozen=True, slots=True, eq=False)
class TraceSums(Reducer[Tensor, Tensor]):
    """The traces of the weighted second moments of (extended) keys and of values, (2,)."""

    on_keys: Tensor
    on_values: Tensor
    extend: "Extended"

    def new(self, like: Tensor) -> Tensor:
        """Return zeros."""
        return torch.zeros(2, dtype=torch.float64)

    def add(self, state: Tensor, block: Block, measures: Tensor, groups_of: Tensor) -> Tensor:
        """Add a block's traces."""
        assert block.values is not None, "this pass reads values"
        at = block.pattern_ids
        pairs = ((self.extend(block.keys), self.on_keys[at]), (block.values, self.on_values[at]))
        for i, (rows, weights) in enumerate(pairs):
            state[i] += (rows.double().square().sum(dim=1).cpu() * weights).sum()
        return state

    def merge(self, first: Tensor, second: Tensor) -> Tensor:
        """Add the traces."""
        return first + second

    def result(self, state: Tensor) -> Tensor:
        """Return the traces of keys' and of values' moments."""
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
    entry = source.require_values(layer)
    extend = extension(source, layer, horizon=len(rates.rate))
    on_keys, on_values, decay = _all_moment_weights(source, layer, rates, losses)
    reducer = MomentSums(on_keys, on_values, extend, (entry.d_out, extend.width(entry.d_in)))
    keys, values = executor.run(source, [_moment_pass(source, layer, len(rates.rate), reducer)])[0]
    for what, moment in (("keys", keys), ("values", values)):
        if not bool(torch.isfinite(moment).all()):
            raise _diverged(layer, what)
    return Moments(keys, values, float(on_keys.sum()), float(decay.sum()))


def find_kernel_sizes(
    source: PatternSource, executor: Executor, layers: Sequence[tuple[str, Rates]], losses: Losses
) -> list[float]:
    """Return t = T tr(A) tr(G) of each layer, from one reading of all: how fast a layer answers to its own absence."""
    jobs, times = [], []
    for layer, rates in layers:
        on_keys, on_values, _ = _all_moment_weights(source, layer, rates, losses)
        reducer = TraceSums(on_keys, on_values, extension(source, layer, horizon=len(rates.rate)))
        jobs.append(_moment_pass(source, layer, len(rates.rate), reducer))
        times.append(float(on_keys.sum()))
    sizes = [float(found.prod()) / time for found, time in zip(executor.run(source, jobs), times, strict=True)]
    for (layer, _), size in zip(layers, sizes, strict=True):
        if not math.isfinite(size):
            raise _diverged(layer, "patterns")
    return sizes


def _diverged(layer: str, what: str) -> QueryError:
    return QueryError(
        f"Layer {layer!r} holds {what} that are not finite, or too large to be squared: the training diverged. "
        "There are no effects; look at an earlier memory.at(step=...)."
    )


def _moment_pass(source: PatternSource, layer: str, horizon: int, reducer: Reducer[Any, R]) -> Pass[R]:
    """Return the pass that adds something up over all patterns of a layer within a horizon."""
    like = torch.empty(0, dtype=torch.float64 if source.layer(layer).dtype == "float64" else torch.float32)
    return Pass(layer, WholeView(source, horizon), reducer, like, values=True)


def _all_moment_weights(
    source: PatternSource, layer: str, rates: Rates, losses: Losses
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights of keys and of values and the part of decay of all a layer's patterns in the horizon, (n,)."""
    parts = [part for part in source.parts() if part.start < len(rates.rate)]
    weights = [_moment_weights(source, layer, part, rates, losses) for part in parts]
    on_keys, on_values, decay = (torch.from_numpy(np.concatenate(each)) for each in zip(*weights, strict=True))
    return on_keys, on_values, decay


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
