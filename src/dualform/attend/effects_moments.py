"""Second moments of a layer's keys and values, as the rates weigh them: what the filter of effects is made of.

    T = sum_s rate_s        A = (1/T) sum_s (rate_s / n) sum x xᵀ        G = (1/T) sum_s rate_s N sum w e eᵀ

Step s has n patterns of this layer; N counts the terms of its loss, which is a mean over them (`effects_losses.py`,
where w comes from too). Every pattern adds its own terms, so parts of a memory may be summed apart and merged in any
order.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualform.attend.effects_losses import Losses
from dualform.attend.effects_rates import Rates, trained_uses
from dualform.errors import QueryError
from dualform.progress import bar
from dualform.store.reader import Run, Shard
from dualform.store.stream import CHUNK, everything, selected, take

WIDEST = 8192  # of a layer whose moments are worth having


@dataclass(slots=True, eq=False)
class Moments:
    """Sums over patterns, float64; `merge` adds those of other patterns."""

    keys: Tensor  # (d_in, d_in), T times A
    values: Tensor  # (d_out, d_out), T times G
    time: float = 0.0  # T
    decay: float = 0.0

    @classmethod
    def empty(cls, d_in: int, d_out: int) -> Self:
        """Return the moments of no patterns."""
        return cls(torch.zeros(d_in, d_in, dtype=torch.float64), torch.zeros(d_out, d_out, dtype=torch.float64))

    def add(self, keys: Tensor, values: Tensor, *, on_keys: Tensor, on_values: Tensor, decay: float) -> None:
        """Add patterns.

        Args:
            keys: (n, d_in)
            values: (n, d_out)
            on_keys: (n,) rate / n of each pattern's step.
            on_values: (n,) rate · N · w.
            decay: these patterns' part of what weight decay takes.
        """
        for total, rows, weight in ((self.keys, keys, on_keys), (self.values, values, on_values)):
            scaled = rows * weight.sqrt().to(rows.dtype)[:, None]
            total += scaled.T @ scaled
        self.time += float(on_keys.double().sum())
        self.decay += decay

    def merge(self, other: Self) -> Self:
        """Return the moments of both parts' patterns."""
        return type(self)(
            self.keys + other.keys, self.values + other.values, self.time + other.time, self.decay + other.decay
        )

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the sums as tensors, by name."""
        numbers = torch.tensor([self.time, self.decay], dtype=torch.float64)
        return {"keys": self.keys, "values": self.values, "numbers": numbers}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Return moments from `to_tensors`."""
        time, decay = tensors["numbers"].tolist()
        return cls(tensors["keys"], tensors["values"], time, decay)


def outside(run: Run, layer: str) -> str | None:
    """Say why a layer has no effects: it is outside the linear family, or too wide. Nothing where it may have them."""
    entry = run.layer(layer)
    if not is_linear(run, layer):
        return f"{entry.kind} is not of the linear family"
    if max(entry.d_in, entry.d_out) > WIDEST:
        return f"{entry.d_in} -> {entry.d_out} is wider than {WIDEST}"
    return None


def is_linear(run: Run, layer: str) -> bool:
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


def extension(run: Run, layer: str, *, horizon: int) -> Extended:
    """Return how a layer's keys are extended."""
    uses = trained_uses(run, layer, horizon=horizon)
    biases = sum(use.parameter_map.is_bias for use in uses)
    return Extended(len(uses) > biases, biases)


def pattern_factors(run: Run, layer: str, shard: Shard, rates: Rates) -> npt.NDArray[np.float64]:
    """Return what rescaled the gradient of each of a layer's patterns in a shard between backward and step."""
    trained = trained_uses(run, layer, horizon=len(rates.rate))
    first = next((use for use in trained if not use.parameter_map.is_bias), trained[0])
    address = shard.addresses(layer)
    _, factors = run.facts(first.parameter)
    return np.asarray(factors[address["step"], address["micro"]])


def pattern_rates(run: Run, layer: str, shard: Shard, rates: Rates) -> npt.NDArray[np.float64]:
    """Return the rate of each of a layer's patterns in a shard: its step's, times its factor; 0 after the horizon."""
    step = shard.addresses(layer)["step"]
    within = step < len(rates.rate)
    each = rates.rate[np.where(within, step, 0)] * pattern_factors(run, layer, shard, rates)
    return np.where(within, each, 0.0)


def find_moments(run: Run, layer: str, rates: Rates, losses: Losses) -> Moments:
    """Add up a layer's moments over all its patterns within the rates' horizon."""
    horizon = len(rates.rate)
    entry = run.require_values(layer)
    extend = extension(run, layer, horizon=horizon)
    total = Moments.empty(extend.width(entry.d_in), entry.d_out)
    with bar(f"moments of {layer}", total=run.count(layer)) as advance:
        for shard in run.shards:
            if shard.entry.start < horizon and shard.count(layer):
                part = _of_shard(run, layer, shard, rates, losses, extend)
                total = total.merge(part)
                advance(shard.count(layer))
    for what, moment in (("keys", total.keys), ("values", total.values)):
        if not bool(torch.isfinite(moment).all()):
            raise QueryError(
                f"Layer {layer!r} holds {what} that are not finite, or too large to be squared: the training diverged. "
                "There are no effects; look at an earlier memory.at(step=...)."
            )
    return total


def _of_shard(run: Run, layer: str, shard: Shard, rates: Rates, losses: Losses, extend: Extended) -> Moments:
    entry = run.layer(layer)
    kept = selected(shard, layer, len(rates.rate), everything)
    step = shard.addresses(layer)["step"]
    each = np.abs(pattern_rates(run, layer, shard, rates))
    count = np.bincount(step)[step]  # n
    weights, terms = losses.of(shard, layer)
    on_keys, on_values = each / count, each * terms * weights
    if losses.scaled:  # the factor belongs to the value and not to the rate
        factors = pattern_factors(run, layer, shard, rates)
        on_keys = np.divide(on_keys, factors, out=np.zeros_like(on_keys), where=factors != 0)
        on_values = on_values * factors
    keys, values = shard.rows(layer, "keys"), shard.rows(layer, "values")
    dtype = torch.float64 if entry.dtype == "float64" else torch.float32
    total = Moments.empty(extend.width(entry.d_in), entry.d_out)
    for start in range(0, len(kept), CHUNK):
        rows = kept[start : start + CHUNK]
        total.add(
            extend(take(keys, rows, dtype, "cpu")),
            take(values, rows, dtype, "cpu"),
            on_keys=torch.from_numpy(on_keys[rows]),
            on_values=torch.from_numpy(on_values[rows]),
            decay=float((rates.decay[step[rows]] / count[rows]).sum()),
        )
    return total
