"""What the values say about the loss: is it a softmax cross-entropy, a mean over how many terms, and how sure?

At the outputs of a softmax the value of a pattern is e = (p - onehot) / N. So p can be read off e, and the weight

    w = (1 - |p|²) / |N e|²        at most 1e4

turns e eᵀ, which knows the label, into what it is on average over the network's own predictions: the curvature of the
loss. Where the loss is something else, w = 1.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualform.engine.block import Block
from dualform.engine.jobs import Executor, Pass, WholeView
from dualform.engine.reducers import Reducer
from dualform.engine.source import PatternPart, PatternSource

FloatArray = npt.NDArray[np.float64]
MAX_LOSS_WEIGHT = 1e4  # weight
SUM_SLACK = 2e-3  # of a sum, relatively: float16 rows are off by less
INT8_DEVIATIONS = 6  # of the random rounding of int8 rows, that a sum may be off: there are many rows
PROBABILITY_ROUNDING = 1e-5  # of a probability


@dataclass(frozen=True, slots=True, eq=False)
class Losses:
    """The loss of each step as the last layer's values tell it.

    Attributes:
        head: the layer whose outputs the softmax is over, or where there is none the last.
        softmax: whether the loss is a softmax cross-entropy.
        scaled: whether the values are that of the loss only after the rescaling between backward and step.
        weights: part -> (n,) w of each of the head's patterns.
        terms: part -> (n,) N of each of the head's patterns.
    """

    run: PatternSource
    head: str
    softmax: bool
    scaled: bool
    weights: Mapping[int, FloatArray]
    terms: Mapping[int, FloatArray]

    def of(self, part: PatternPart, layer: str) -> tuple[FloatArray, FloatArray]:
        """Return w and N for each of a layer's patterns in a part.

        A pattern has the w of the head's pattern of the same row and position; where the head has no such position, the
        mean over the row's; where it has no such row, the mean over the step's.
        """
        weights, terms = self.weights[part.index], self.terms[part.index]
        mine, heads = part.addresses(layer), part.addresses(self.head)
        if all(np.array_equal(mine[name], heads[name]) for name in ("step", "micro", "row", "position")):
            return weights, terms
        columns = ("step", "micro", "row", "position")
        size = [1 + max(int(found[name].max(initial=0)) for found in (mine, heads)) for name in columns]
        found = np.full(len(mine["step"]), np.nan)
        counted = np.full(len(mine["step"]), np.nan)
        for used in (columns, columns[:3], columns[:2], columns[:1]):
            codes = [np.ravel_multi_index([each[name] for name in used], size[: len(used)]) for each in (mine, heads)]
            lacking = np.isnan(found)
            found[lacking] = _mean_by_code(codes[1], weights, codes[0][lacking])
            counted[lacking] = _mean_by_code(codes[1], terms, codes[0][lacking])
        return np.nan_to_num(found, nan=1.0), np.nan_to_num(counted, nan=1.0)


def _mean_by_code(codes: npt.NDArray[np.int64], values: FloatArray, wanted: npt.NDArray[np.int64]) -> FloatArray:
    """Return the mean of the values with each of the wanted codes, NaN where there are none."""
    present, at = np.unique(codes, return_inverse=True)
    means = np.bincount(at, weights=values) / np.maximum(np.bincount(at), 1)
    if not len(present):
        return np.full(len(wanted), np.nan)
    place = np.searchsorted(present, wanted).clip(max=len(present) - 1)
    return np.where(present[place] == wanted, means[place], np.nan)


@dataclass(frozen=True, slots=True, eq=False)
class _Head:
    """What a layer's values are like, over all its patterns in a part: (n,) each.

    Attributes:
        positive: the sum of the positive elements: (1 - p of the label) / N at a softmax.
        square: |e|².
        target: the least element, which is negative, minus the positive sum.
        alike: whether no other element is negative.
    """

    positive: FloatArray
    square: FloatArray
    target: FloatArray
    alike: npt.NDArray[np.bool_]


def find_losses(run: PatternSource, executor: Executor, layers: list[str]) -> Losses:
    """Look for the softmax among these layers, from the last to the first."""
    assert layers, "there are layers with values"
    for layer in reversed(layers):
        # Most layers are no softmax's, which their first steps tell.
        if not _look(run, executor, layer, horizon=1)[3].all():
            continue
        features = _look(run, executor, layer, horizon=run.steps)
        if not features[3].all():
            continue
        heads: dict[int, _Head] = {}
        for part in run.parts():
            positive, square, target, alike = features[:, : part.count(layer)]
            heads[part.index] = _Head(positive, square, target, alike.astype(bool))
            features = features[:, part.count(layer) :]
        for scaled in (False, True):
            for way in ("step", "nonzero", "micro", "micro nonzero", "one"):
                found = _weigh(run, layer, heads, way, scaled=scaled)
                if found is not None:
                    return found
    last = layers[-1]
    terms = {part.index: _count(part, last, "step", None) for part in run.parts()}
    return Losses(run, last, False, False, {index: np.ones_like(n) for index, n in terms.items()}, terms)


@dataclass(frozen=True, slots=True)
class ValueFeatures(Reducer[tuple[Tensor, ...], Tensor]):
    """Four features of each pattern's value, (4, T), in the order of patterns: see `_Head`."""

    def new(self, like: Tensor) -> tuple[Tensor, ...]:
        """Return no features."""
        return (torch.zeros(5, 0, dtype=torch.float64),)

    def add(self, state: tuple[Tensor, ...], block: Block, measures: Tensor, groups_of: Tensor) -> tuple[Tensor, ...]:
        """Keep the features of a block's values, with the patterns' ids."""
        assert block.values is not None, "this pass reads values"
        found = _features(block.values.double())
        return (*state, torch.cat([found, torch.from_numpy(block.patterns).double()[None]]))

    def merge(self, first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Keep both."""
        return first + second

    def result(self, state: tuple[Tensor, ...]) -> Tensor:
        """Return the features in the order of patterns."""
        every = torch.cat(state, dim=1)
        return every[:4, every[4].argsort()]


def _look(run: PatternSource, executor: Executor, layer: str, *, horizon: int) -> FloatArray:
    """Return positive, square, target and alike of each of a layer's values in the first steps, (4, n)."""
    like = torch.empty(0, dtype=torch.float64)
    job = Pass(layer, WholeView(run, horizon), ValueFeatures(), like, values=True)
    found: FloatArray = executor.run(run, [job])[0].numpy()
    return found


def _features(values: Tensor) -> Tensor:
    """Return positive, square, target and alike of values (n, d_out), (4, n)."""
    positive = values.clamp(min=0).sum(dim=1)
    alike = ((values < 0).sum(dim=1) <= 1) & torch.isfinite(values).all(dim=1)
    return torch.stack([positive, values.square().sum(dim=1), values.min(dim=1).values, alike.double()])


def _weigh(run: PatternSource, layer: str, heads: Mapping[int, _Head], way: str, *, scaled: bool) -> Losses | None:
    """Return the losses if N counted this way makes every value a softmax's."""
    entry = run.layer(layer)
    slack = SUM_SLACK if entry.dtype != "int8" else _int8_slack(entry.d_out)
    weights: dict[int, FloatArray] = {}
    terms: dict[int, FloatArray] = {}
    largest = 0.0
    _, factors = run.facts(next(iter(run.layer(layer).parameters.values())))
    for part in run.parts():
        head = heads[part.index]
        address = part.addresses(layer)
        n = _count(part, layer, way, head)
        factor = factors[address["step"], address["micro"]] if scaled else np.ones(len(n))
        if not factor.all():  # not what was trained
            return None
        positive, target = n * factor * head.positive, n * factor * head.target
        balanced = np.abs(positive + target) <= slack * np.maximum(positive, -target) + PROBABILITY_ROUNDING
        if not bool((balanced & (positive <= 1 + slack)).all()):
            return None
        square = (n * factor) ** 2 * head.square  # |N e|²
        # p is N e but at the label, where it is 1 + N e; so |p|² = |N e|² + 1 + 2 N e_label
        uncertain = -square - 2 * target
        ratio = np.divide(uncertain, square, out=np.zeros_like(square), where=square > 0)
        weights[part.index] = ratio.clip(0.0, MAX_LOSS_WEIGHT)
        terms[part.index] = n
        largest = max(largest, float(positive.max(initial=0.0)))
    if largest < 100 * PROBABILITY_ROUNDING:  # anything would pass
        return None
    return Losses(run, layer, True, scaled, weights, terms)


def _int8_slack(d_out: int) -> float:
    """Return how far the sum of a softmax's int8 value may be off, relative to its label's element, which is 127 units.

    An element of y units has a variance of f · (1 − f) with f = y − floor(y): at most 1/4, and at most |y|, of which
    there are 127 beside the label.
    """
    return INT8_DEVIATIONS * math.sqrt(min(d_out / 4, 127)) / 127


def _count(part: PatternPart, layer: str, way: str, head: _Head | None) -> FloatArray:
    """Return N for each of a layer's patterns: how many share its step (or backward), all or those with an error."""
    address = part.addresses(layer)
    step, micro = address["step"], address["micro"]
    if way == "one":
        return np.ones(len(step))
    codes = step * (1 + micro.max(initial=0)) + micro if way.startswith("micro") else step
    counted = head.square > 0 if head is not None and way.endswith("nonzero") else np.ones(len(step), dtype=bool)
    return np.maximum(np.bincount(codes, weights=counted, minlength=1)[codes], 1.0)
