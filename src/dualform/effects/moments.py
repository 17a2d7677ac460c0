"""Second moments of a layer's keys and values, as the rates weigh them: what the filter of effects is made of.

    T = sum_s rate_s        A = (1/T) sum_s (rate_s / n) sum x xᵀ        G = (1/T) sum_s rate_s N sum w e eᵀ

Step s has n patterns of this layer; N counts the terms of its loss, which is a mean over them (`losses.py`,
where w comes from too). Every pattern adds its own terms, so parts of a memory may be summed apart and merged in any
order.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualform.effects.filter import Side, whole_side
from dualform.effects.losses import Losses
from dualform.effects.rates import Rates, trained_uses
from dualform.engine.block import Block
from dualform.engine.jobs import Executor, Pass, WholeView
from dualform.engine.reducers import Reducer
from dualform.engine.source import PatternPart, PatternSource
from dualform.errors import QueryError

R = TypeVar("R")
WIDEST = 8192
"""Width up to which all eigenvectors of a moment are found; of wider ones those with the largest eigenvalues."""
RANK = 256
"""Number of eigenvectors that are found of a wide moment."""
OVERSAMPLING = 32
"""Number of random columns beyond those, which make their eigenvectors more exact."""
PROBES = 16
"""Number of random columns with which the error of a wide moment is measured."""


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """A layer's moments and its time.

    Attributes:
        keys: A, by its eigenvectors.
        values: G, likewise.
        errors: ‖moment − kept‖ / ‖moment‖ of keys and of values: 0 unless only some eigenvectors were looked for.
        time: T.
        decay: what weight decay takes, summed over steps.
    """

    keys: Side
    values: Side
    errors: tuple[float, float]
    time: float
    decay: float


@dataclass(frozen=True, slots=True, eq=False)
class MomentSum(Reducer[Tensor, Tensor]):
    """The weighted second moment of (extended) keys or of values, or its product with some columns.

    Attributes:
        of: which of the two.
        weights: (T,) of each pattern: rate / n for keys, rate · N · w for values.
        extend: how biases extend keys.
        width: of extended keys, or of values.
        columns: (width, k) to multiply the moment with, so that it never lies in memory; None for the moment itself.
    """

    of: Literal["keys", "values"]
    weights: Tensor
    extend: "Extended"
    width: int
    columns: Tensor | None = None
    needs_all_threads = True

    def new(self, like: Tensor) -> Tensor:
        """Return zeros."""
        return torch.zeros(
            self.width, self.width if self.columns is None else self.columns.shape[1], dtype=torch.float64
        )

    def add(self, state: Tensor, block: Block, measures: Tensor, groups_of: Tensor) -> Tensor:
        """Add a block's moment."""
        assert block.values is not None, "this pass reads values"
        rows = self.extend(block.keys) if self.of == "keys" else block.values
        scaled = rows * self.weights[block.pattern_ids].sqrt().to(rows.dtype)[:, None]
        state += scaled.T @ (scaled if self.columns is None else scaled @ self.columns.to(rows))
        return state

    def merge(self, first: Tensor, second: Tensor) -> Tensor:
        """Add the moments."""
        return first + second

    def result(self, state: Tensor) -> Tensor:
        """Return the moment."""
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
    """Say why a layer has no effects: its patterns are not kept, or it is outside the linear family.

    Nothing where it may have them.
    """
    entry = run.layer(layer)
    if entry.store == "shares":
        return f"its patterns are not kept; record them too, keep=[..., dualform.Patterns(layers={layer!r})]"
    if not is_linear(run, layer):
        return f"{entry.kind} is not of the linear family"
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
    time = float(on_keys.sum())
    sides = (
        MomentSum("keys", on_keys, extend, extend.width(entry.d_in)),
        MomentSum("values", on_values, extend, entry.d_out),
    )

    def add_up(sums: Sequence[Reducer[Any, Tensor]]) -> list[Tensor]:
        found = executor.run(source, [_moment_pass(source, layer, len(rates.rate), one) for one in sums])
        for one, moment in zip(sums, found, strict=True):
            if not bool(torch.isfinite(moment).all()):
                raise _diverged(layer, one.of if isinstance(one, MomentSum) else "patterns")
        return [moment / time for moment in found]

    narrow = [side for side in sides if side.width <= WIDEST]
    found = dict(zip([side.of for side in narrow], add_up(narrow), strict=True)) if narrow else {}
    kept, errors = [], []
    for side in sides:
        if side.of in found:
            made, error = whole_side(found[side.of]), 0.0
        else:
            trace = add_up([TraceSums(on_keys, on_values, extend)])[0][0 if side.of == "keys" else 1]
            product = lambda columns, side=side: add_up([replace(side, columns=columns)])[0]  # noqa: E731
            made, error = largest_eigenvectors(product, side.width, float(trace))
        kept.append(made)
        errors.append(error)
    return Moments(kept[0], kept[1], (errors[0], errors[1]), time, float(decay.sum()))


def largest_eigenvectors(product: Callable[[Tensor], Tensor], width: int, trace: float) -> tuple[Side, float]:
    """Return the eigenvectors of a moment with the largest eigenvalues, and how far they are from all of it.

    By randomised subspace iteration (Halko, Martinsson, Tropp, 2011): three products with the moment, each a pass over
    the patterns. What is left of the trace is spread evenly over all other directions.

    Args:
        product: returns the moment times columns (width, k).
        width: d.
        trace: of the moment.

    Returns:
        the side, and ‖moment − kept‖ / ‖moment‖ (Frobenius), measured with random columns that the eigenvectors do not
        know.
    """
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(width, RANK + OVERSAMPLING + PROBES, generator=generator, dtype=torch.float64)
    random, probes = random.split([RANK + OVERSAMPLING, PROBES], dim=1)
    basis = torch.linalg.qr(product(torch.linalg.qr(product(random)).Q)).Q
    image, probed = product(torch.cat([basis, probes], dim=1)).split([basis.shape[1], PROBES], dim=1)
    found, turned = torch.linalg.eigh(basis.T @ image)
    found, basis = found[-RANK:].clamp(min=0), basis @ turned[:, -RANK:]
    rest = max(trace - float(found.sum()), 0.0) / (width - RANK)
    side = Side(basis, torch.cat([found, found.new_tensor([rest])]))
    left = probed.T - side.scale(side.moment[None], probes.T)[0]
    return side, float(left.norm() / probed.norm().clamp(min=1e-300))


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
