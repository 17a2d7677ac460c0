"""How fast a layer learnt at each step: one number per step, whatever the optimizer.

SGD with momentum moves, in the long run, by lr / (1 - momentum) times a gradient. The other optimizers are replayed;
what multiplies the gradient G of a step is then measured along G itself, for Adam

    rate = lr <D, G∘G> / <G, G>        D = 1 / (sqrt(v̂) + eps)

A rate says how a gradient acts on average. It is no coefficient: it does not make the weight.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dualform.engine.jobs import Executor, Fold
from dualform.engine.parameter_steps import Following, GroupsByPart, RetakenStep
from dualform.engine.source import PatternSource
from dualform.identity.families import UpdateRates
from dualform.identity.families.optimizer_facts import MeasuredRate, Series
from dualform.identity.families.optimizer_kind import require_optimizer_kind
from dualform.identity.families.optimizer_replay import OptimizerReplay
from dualform.identity.parameter_use import ParameterUse


@dataclass(frozen=True, slots=True)
class Rates:
    """A layer's rates, and what weight decay takes from any change of its weight, per step, (S,) each."""

    rate: Series
    decay: Series


def find_rates(run: PatternSource, executor: Executor, layers: Sequence[str], *, horizon: int) -> dict[str, Rates]:
    """Return the rates of layers over the first `horizon` steps, 0 where they were not updated, from one reading.

    Weight and bias of a layer have one rate: the weight's, or where all are replayed the mean of theirs, each counting
    as much as its gradient.
    """
    found: dict[str, Rates] = {}
    replayed: dict[str, list[str]] = {}
    for layer in layers:
        trained = trained_uses(run, layer, horizon=horizon)
        names = list(dict.fromkeys(use.parameter for use in trained))
        scalar: dict[str, Rates] = {}
        for name in names:
            facts, _ = run.facts(name)
            if (known := require_optimizer_kind(facts.optimizer).setting_rates(facts)) is not None:
                scalar[name] = _by_step(known, facts.step, horizon)
        if not names:
            found[layer] = Rates(np.zeros(horizon), np.zeros(horizon))
            continue
        first = next((use.parameter for use in trained if not use.parameter_map.is_bias), names[0])
        if first in scalar or len(scalar) == len(names):
            found[layer] = scalar[first]
        else:
            replayed[layer] = [name for name in names if name not in scalar]
    if replayed:
        every = tuple(dict.fromkeys(name for names in replayed.values() for name in names))
        folded = executor.run(run, [Fold(every, horizon, RatesOf())])[0]
        found |= {layer: _mean_rates([folded[name] for name in names], horizon) for layer, names in replayed.items()}
    return found


def _mean_rates(folded: Sequence[Mapping[int, MeasuredRate]], horizon: int) -> Rates:
    """Return the mean of some parameters' measured rates, each counting as much as its gradient."""
    rate, decay = np.zeros(horizon), np.zeros(horizon)
    for step in range(horizon):
        moved = [found for each in folded if (found := each.get(step)) is not None]
        if total := sum(one.square for one in moved):
            rate[step] = sum(one.along for one in moved) / total
            decay[step] = sum(one.square * one.decay for one in moved) / total
    return Rates(rate, decay)


@dataclass(frozen=True, slots=True)
class RatesOf:
    """Measure the rate of a parameter in each of its steps, along the step's gradient."""

    def start(self, replay: OptimizerReplay, groups: GroupsByPart | None) -> "_FollowingRates":
        """Return the following of one parameter."""
        return _FollowingRates()


class _FollowingRates(Following[dict[int, MeasuredRate]]):
    """The rates of one parameter: step -> measured rate."""

    def __init__(self) -> None:
        self._rates: dict[int, MeasuredRate] = {}

    def after_step(self, taken: RetakenStep) -> None:
        """Measure a step's rate."""
        self._rates[taken.step] = taken.linear.rate(taken.gradient)

    def result(self) -> dict[int, MeasuredRate]:
        """Return the rates."""
        return self._rates


def trained_uses(run: PatternSource, layer: str, *, horizon: int) -> list[ParameterUse]:
    """Return the uses of those parameters of a layer that the optimizer moved within the horizon."""
    return [use for use in run.layer(layer).uses if bool((run.facts(use.parameter)[0].step < horizon).any())]


def _by_step(found: UpdateRates, step: npt.NDArray[np.int64], horizon: int) -> Rates:
    """Return the rates of a parameter's updates as rates of all steps, 0 where it was not updated."""
    seen = step < horizon
    rate, decay = np.zeros(horizon), np.zeros(horizon)
    rate[step[seen]], decay[step[seen]] = found.rate[seen], found.decay[seen]
    return Rates(rate, decay)
