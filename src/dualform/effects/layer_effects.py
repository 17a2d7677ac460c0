"""Effects: a prediction, from the memory alone, of what training without a pattern would change.

    effect_t = -rate_s · e_tᵀ [U_G (F ∘ (U_Gᵀ g)(U_Aᵀ q)ᵀ) U_Aᵀ] x_t

for a test input with query q at the layer and gradient g of some quantity at its output (summed over the input's
queries where it has several). An effect is what training on the pattern is predicted to have brought to the quantity:
without the pattern, the quantity would be lower by that. Totals by few groups are exact products of filtered queries
with the groups' shares; everything else is a streaming pass over queries that were mapped once (`Filter.turn`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from dualform.effects.cautions import regime_cautions, size_cautions, weight_change
from dualform.effects.filter import Filter, Side, make_filter, no_filter
from dualform.effects.losses import Losses, find_losses
from dualform.effects.moments import (
    RANK,
    Extended,
    extension,
    find_kernel_sizes,
    find_moments,
    is_linear,
    outside,
    pattern_rates,
)
from dualform.effects.output_gradients import OutputGradients
from dualform.effects.rates import Rates, find_rates
from dualform.effects.views import EffectGroups, EffectView
from dualform.engine.answer_cache import AnswerCache
from dualform.engine.block import Block
from dualform.engine.jobs import Pass
from dualform.engine.reading import BLOCK_PATTERNS
from dualform.engine.reducers import GroupSums, Reducer, Sums, each_group, joined
from dualform.engine.source import PatternSource
from dualform.errors import QueryError

R = TypeVar("R")
Filtering = Literal["joint", "layerwise", "none"]
"""How later steps answer to an absence: all layers together, each layer for itself, or not at all, which leaves what
the updates did themselves with all later steps held as they were."""
STRENGTHS = (1.0, 0.25, 4.0)
"""Strengths of the filter: first its own; effects at the others say how far an effect depends on it."""
FILTERING: Filtering = "joint"
"""The filter that effects have; chosen by a rule that was written down beforehand (benchmarks/truth)."""
MAX_EFFECT_SHARES_BYTES = 1 << 30  # bytes of group shares that may be held at most
PRODUCT_OVERHEAD = 100_000  # multiplications that take as long as a small product's overhead
MAX_CACHED_GROUPS = 64  # groups, whose shares are worth keeping for the next question
MAX_EFFECT_QUERIES = 1 << 12  # queries of one pass at most


@dataclass(frozen=True, slots=True, eq=False)
class LayerEffects:
    """The effects of one layer's patterns in a view on a quantity of test inputs; the filter is of all of training."""

    table: EffectView
    cache: AnswerCache
    layer: str
    queries: Tensor  # (Q, d_in)
    gradients: OutputGradients
    dtype: torch.dtype
    filtering: Filtering = FILTERING
    held: dict[Filtering, Filter] = field(default_factory=dict)
    moment_errors: dict[str, float] = field(default_factory=dict)  # of keys and values, once the filter is made

    def __len__(self) -> int:
        return self.gradients.inputs

    def totals(self, grouping: EffectGroups) -> Tensor:
        """Return the sum of effects per group, (M, G), in float64, the cheaper way."""
        return self.totals_at(grouping, (1.0,))[0]

    def totals_at(self, grouping: EffectGroups, strengths: Sequence[float]) -> Tensor:
        """Return the sums of effects per group had later steps answered more strongly, or weakly, (S, M, G)."""
        groups = len(grouping.labels)
        if self._shares_are_cheaper(groups, len(grouping.codes)):
            shares = self._shares(grouping)
            return torch.stack([self._by_shares(shares, strength) for strength in strengths])
        found = []
        for strength in strengths:
            stronger = (
                self if strength == 1.0 else replace(self, held={self.filtering: self.filter().stronger(strength)})
            )
            found.append(stronger.reduce(grouping, GroupSums(groups), block=None))
        return torch.stack(found)

    def _shares_are_cheaper(self, groups: int, patterns: int) -> bool:
        """Say whether to multiply with the groups' shares, (G, d_out, d_in), or to measure every pattern."""
        queries, d_in, d_out = (
            len(self.queries),
            self._extend.width(self.queries.shape[1]),
            self.gradients.rows.shape[1],
        )
        size = d_in * d_out
        if 8 * max(groups, len(self)) * size > MAX_EFFECT_SHARES_BYTES:
            return False
        products = min(patterns, groups * math.ceil(patterns / BLOCK_PATTERNS))
        by_shares = (patterns + queries + len(self) * (groups + d_in + d_out)) * size + products * PRODUCT_OVERHEAD
        return by_shares < patterns * queries * (d_in + d_out) * len(self.filter().left) or groups <= MAX_CACHED_GROUPS

    def reduce(
        self,
        grouping: EffectGroups | None,
        reducer: Reducer[Any, R],
        *,
        block: int | None,
        block_patterns: int | None = None,
    ) -> R:
        """Measure every pattern of the view for each input, and reduce, in blocks of inputs."""
        rates, results = self._pattern_rates(), []
        for inputs in self._blocks(block):
            rows = torch.isin(self.gradients.of, inputs).nonzero()[:, 0]
            place = torch.searchsorted(inputs, self.gradients.of[rows])
            values, keys = self.filter().turn(self.gradients.rows[rows].double(), self._extended[rows].double())
            measure = _Effect(
                values.to(self.dtype),
                keys.to(self.dtype),
                self._extend,
                rates,
                place,
                len(inputs),
            )
            job = Pass(
                layer=self.layer,
                view=self.table,
                reducer=reducer,
                like=torch.empty(0, dtype=self.dtype, device=self.queries.device),
                queries=self.queries[rows],
                measure=measure,
                rows=len(inputs),
                groups=grouping,
                block_patterns=block_patterns,
            )
            results.append(self.table.answer(job))
        whole: R = joined(results)
        return whole

    def filter(self) -> Filter:
        """Return the layer's filter, built once for the run and a horizon."""

        def compute() -> dict[str, Tensor]:
            found = find_moments(self.table.run, self.table.executor, self.layer, self.rates(), self._losses())
            kappa = self._others_too() if self.filtering == "joint" else 1.0
            made = make_filter(found.keys, found.values, found.time * kappa, found.decay)
            return {
                "keys": made.keys.basis,
                "key moment": made.keys.moment,
                "values": made.values.basis,
                "value moment": made.values.moment,
                "left": made.left,
                "right": made.right,
                "numbers": torch.tensor([made.time, made.decay, *found.errors], dtype=torch.float64),
            }

        self.require()
        if self.filtering not in self.held:
            if self.filtering == "none":
                made = no_filter(self._extend.width(self.queries.shape[1]), self.gradients.rows.shape[1])
            else:
                what = ("effect filter", self.filtering, self.layer, self.table.horizon)
                kept = self.cache.get(what, compute)
                keys, values = Side(kept["keys"], kept["key moment"]), Side(kept["values"], kept["value moment"])
                time, decay, *errors = kept["numbers"].tolist()
                self.moment_errors.update(zip(("keys", "values"), errors, strict=True))
                made = Filter(keys, values, time, decay, kept["left"], kept["right"])
            self.held[self.filtering] = made.to(self.queries.device)
        return self.held[self.filtering]

    def rates(self) -> Rates:
        """Return the layer's rates."""
        return layer_rates(self.table, self.cache, [self.layer])[self.layer]

    def _others_too(self) -> float:
        """Return kappa: how much faster an absence is repaired by all layers together than by this one alone."""
        sizes = kernel_sizes(self.table, self.cache)
        return sum(sizes.values()) / sizes[self.layer] if sizes[self.layer] else 1.0

    def require(self) -> None:
        """Raise unless this layer can have effects."""
        self.table.run.require_values(self.layer)
        if not self.table.run.count(self.layer) or not bool(self.rates().rate.any()):
            raise QueryError(
                f"Layer {self.layer!r} was not trained within {self.table.horizon} steps: it has no effects. "
                "Leave it out, with attend(layers=[...])."
            )

    def cautions(self, grouping: EffectGroups | None) -> list[str]:
        """Return reasons to trust the layer's effects less; of groups, whether some are too large to be additive."""
        run, horizon = self.table.run, self.table.horizon
        found = regime_cautions(horizon, self._weight_change() if horizon == run.steps else None)
        for side, error in self.moment_errors.items():
            if error:
                found.append(
                    f"layer {self.layer!r} is wide: of its {side}, {RANK} directions are told apart, which leaves "
                    f"{error:.0%} of their second moment"
                )
        if grouping is not None:
            found += size_cautions(grouping.labels, grouping.codes)
        return found

    def _weight_change(self) -> float | None:
        """Return the change of all weights over the training, of their size at the start; None if it is not known."""

        def compute() -> dict[str, Tensor]:
            change = weight_change(self.table.run)
            return {"change": torch.tensor([] if change is None else [change], dtype=torch.float64)}

        known = self.cache.get(("weight change",), compute)["change"].tolist()
        return known[0] if known else None

    @property
    def _extend(self) -> Extended:
        return extension(self.table.run, self.layer, horizon=self.table.horizon)

    @property
    def _extended(self) -> Tensor:
        return self._extend(self.queries)

    def _losses(self) -> Losses:
        return losses(self.table, self.cache)

    def _pattern_rates(self) -> Tensor:
        """Return the rate of every pattern of the layer, (T,)."""
        self.require()
        run, rates = self.table.run, self.rates()
        parts = [pattern_rates(run, self.layer, shard, rates) for shard in run.parts()]
        return torch.from_numpy(np.concatenate(parts)).to(self.queries.device, self.dtype)

    def _shares(self, grouping: EffectGroups) -> Tensor:
        """Return sum_t rate_t e_t x_tᵀ over each group's patterns, (G, d_out, d_in)."""

        def compute() -> dict[str, Tensor]:
            shape = (len(grouping.labels), self.gradients.rows.shape[1], self._extend.width(self.queries.shape[1]))
            reducer = _EffectShares(shape, self._extend, self._pattern_rates())
            like = torch.empty(0, dtype=self.dtype, device=self.queries.device)
            job = Pass(self.layer, self.table, reducer, like, groups=grouping, values=True)
            return {"shares": self.table.answer(job)}

        what = ("effect shares", self.layer, self.table.conditions, self.table.horizon, grouping.parts)
        return self.cache.get(what, compute)["shares"].to(self.queries.device)

    def _by_shares(self, shares: Tensor, strength: float) -> Tensor:
        """Return -⟨sum of g qᵀ over an input's queries, filtered, share⟩ per input and group, (M, G).

        The filter is symmetric, so that it does not matter which of the two it is applied to.
        """
        queries, gradients = self._extended.double(), self.gradients.rows.double()
        order = self.gradients.of.argsort(stable=True)
        parts = order.split(torch.bincount(self.gradients.of, minlength=len(self)).tolist())
        per_input = torch.stack([gradients[rows].T @ queries[rows] for rows in parts])  # (M, d_out, d_in)
        return -self.filter().apply(per_input, strength=strength).flatten(1) @ shares.flatten(1).T

    def _blocks(self, block: int | None) -> list[Tensor]:
        """Return the inputs in blocks, each with few enough queries for one pass."""
        most = max(1, len(self) * MAX_EFFECT_QUERIES // max(len(self.queries), 1))
        size = min(most, block or most)
        return list(torch.arange(len(self), device=self.queries.device).split(size))


def layer_rates(table: EffectView, cache: AnswerCache, layers: Sequence[str]) -> dict[str, Rates]:
    """Return the rates of layers, found once for the run and a horizon, of all that are lacking in one reading."""
    kept = {layer: cache.find(("effect rates", layer, table.horizon)) for layer in layers}
    lacking = [layer for layer, tensors in kept.items() if tensors is None]
    found = find_rates(table.run, table.executor, lacking, horizon=table.horizon) if lacking else {}
    for layer, rates in found.items():
        tensors = {"rate": torch.from_numpy(rates.rate), "decay": torch.from_numpy(rates.decay)}
        cache.keep(("effect rates", layer, table.horizon), tensors)
    known = {layer: Rates(one["rate"].numpy(), one["decay"].numpy()) for layer, one in kept.items() if one is not None}
    return {layer: known[layer] if layer in known else found[layer] for layer in layers}


def kernel_sizes(table: EffectView, cache: AnswerCache) -> dict[str, float]:
    """Return t = T tr(A) tr(G) of every layer that has effects, found once for the run and a horizon."""
    run = table.run
    layers = [name for name in _linear_layers(run) if outside(run, name) is None]
    trained = {name: rates for name, rates in layer_rates(table, cache, layers).items() if rates.rate.any()}

    def compute() -> dict[str, Tensor]:
        found = find_kernel_sizes(run, table.executor, list(trained.items()), losses(table, cache))
        return {"sizes": torch.tensor(found, dtype=torch.float64)}

    sizes = cache.get(("effect kernel sizes", tuple(trained), table.horizon), compute)["sizes"]
    return dict(zip(trained, sizes.tolist(), strict=True))


def _linear_layers(run: PatternSource) -> list[str]:
    """Return the layers of the linear family whose patterns are kept whole."""
    return [n for n, e in run.layers.items() if e.has_values and run.count(n) and is_linear(run, n)]


def losses(table: EffectView, cache: AnswerCache) -> Losses:
    """Return what the values say about the loss, found once for the run."""
    run = table.run
    layers = _linear_layers(run)
    found: list[Losses] = []

    def compute() -> dict[str, Tensor]:
        found.append(find_losses(run, table.executor, layers))
        one = found[0]
        head = torch.tensor([layers.index(one.head), one.softmax, one.scaled])
        weights = {f"weights/{i}": torch.from_numpy(w) for i, w in one.weights.items()}
        return {"what": head, **weights, **{f"terms/{i}": torch.from_numpy(n) for i, n in one.terms.items()}}

    tensors = cache.get(("effect losses", tuple(layers)), compute)
    if found:
        return found[0]
    head, softmax, scaled = tensors["what"].tolist()
    indices = [shard.index for shard in run.parts()]
    weights, terms = ({i: tensors[f"{what}/{i}"].numpy() for i in indices} for what in ("weights", "terms"))
    return Losses(run, layers[head], bool(softmax), bool(scaled), weights, terms)


@dataclass(frozen=True, slots=True, eq=False)
class _Effect:
    """Measures a block's patterns by their effect on each input of a block: -rate Σ_r (e·P_r g)(x·R_r q)."""

    values: Tensor  # (r, Q, d_out) P_r g
    keys: Tensor  # (r, Q, d_in) R_r q
    extend: Extended
    rates: Tensor  # (T,)
    place: Tensor  # (Q,) each query's input within the block
    inputs: int
    needs_values: bool = True

    def __call__(self, queries: Tensor, block: Block, out: Tensor | None = None) -> Tensor:
        """Return the effects, (inputs, n)."""
        assert block.values is not None, "this pass reads values"
        keys = self.extend(block.keys)
        total = torch.zeros(len(queries), len(keys), dtype=keys.dtype, device=keys.device)
        for on_values, on_keys in zip(self.values, self.keys, strict=True):
            total += (on_values @ block.values.T).mul_(on_keys @ keys.T)
        total *= -self.rates[torch.from_numpy(block.patterns).to(keys.device)]
        return total.new_zeros(self.inputs, total.shape[1]).index_add_(0, self.place, total)


@dataclass(frozen=True, slots=True, eq=False)
class _EffectShares(Sums):
    """The sum of rate · e xᵀ per group, (G, d_out, d_in)."""

    shape: tuple[int, ...]
    extend: Extended
    rates: Tensor  # (T,)
    needs_all_threads = True

    def new(self, like: Tensor) -> Tensor:
        """Return zeros."""
        return torch.zeros(self.shape, dtype=torch.float64, device=like.device)

    def add(self, state: Tensor, block: Block, measures: Tensor, groups_of: Tensor) -> Tensor:
        """Add a block's updates by group."""
        assert block.values is not None, "this pass reads values"
        rates = self.rates[torch.from_numpy(block.patterns).to(groups_of.device)]
        values, keys = block.values * rates[:, None], self.extend(block.keys)
        for group, members in each_group(groups_of):
            state[group] += values[members].T @ keys[members]
        return state
