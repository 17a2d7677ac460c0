"""How fast a layer learnt at each step: one number per step, whatever the optimizer.

SGD with momentum moves, in the long run, by lr / (1 - momentum) times a gradient. The other optimizers are replayed;
what multiplies the gradient G of a step is then measured along G itself, for Adam

    rate = lr <D, G∘G> / <G, G>        D = 1 / (sqrt(v̂) + eps)

A rate says how a gradient acts on average. It is no coefficient: it does not make the weight.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualform.engine.replay import maps
from dualform.engine.source import PatternSource
from dualform.identity.families import kinds
from dualform.identity.families.replayed import Kind, Map
from dualform.identity.parameter_use import ParameterUse
from dualform.progress import bar

Series = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rates:
    """A layer's rates, and what weight decay takes from any change of its weight, per step, (S,) each."""

    rate: Series
    decay: Series


def find_rates(run: PatternSource, layer: str, *, horizon: int) -> Rates:
    """Return a layer's rates over the first `horizon` steps, 0 where it was not updated.

    Weight and bias of a layer have one rate: the weight's, or where all are replayed the mean of theirs, each counting
    as much as its gradient.
    """
    trained = trained_uses(run, layer, horizon=horizon)
    names = list(dict.fromkeys(use.parameter for use in trained))
    scalar = {name: _scalar(run, name, horizon) for name in names if not run.is_replayed(name)}
    replayed = [name for name in names if name not in scalar]
    if not names:
        return Rates(np.zeros(horizon), np.zeros(horizon))
    first = next((use.parameter for use in trained if not use.parameter_map.is_bias), names[0])
    if not replayed or first in scalar:
        return scalar[first]
    optimizers = {name: kinds()[run.facts(name)[0].optimizer] for name in replayed}
    rate, decay = np.zeros(horizon), np.zeros(horizon)
    with bar(f"replaying {layer}", total=horizon) as advance:
        for step, found in maps(run, layer, horizon=horizon):
            moved = [_measured(optimizers[name], *found[name]) for name in replayed if name in found]
            if total := sum(square for _, square, _ in moved):
                rate[step] = sum(along for along, _, _ in moved) / total
                decay[step] = sum(square * taken for _, square, taken in moved) / total
            advance(1)
    return Rates(rate, decay)


def trained_uses(run: PatternSource, layer: str, *, horizon: int) -> list[ParameterUse]:
    """Return the uses of those parameters of a layer that the optimizer moved within the horizon."""
    return [use for use in run.layer(layer).uses if bool((run.facts(use.parameter)[0].step < horizon).any())]


def _scalar(run: PatternSource, parameter: str, horizon: int) -> Rates:
    facts, _ = run.facts(parameter)
    seen = facts.step < horizon
    at = facts.step[seen]

    def setting(name: str) -> Series:
        return np.asarray(facts.settings[name], dtype=np.float64)[seen]

    momentum = setting("momentum")
    kept = np.where(momentum > 0, 1 - setting("dampening"), 1.0)
    each = setting("lr") * kept / (1 - momentum)
    rate, decay = np.zeros(horizon), np.zeros(horizon)
    rate[at] = np.where(setting("maximize") > 0, -each, each)
    decay[at] = each * setting("weight_decay")
    return Rates(rate, decay)


def _measured(kind: Kind[Any], linear: Map, gradient: Tensor, age: float) -> tuple[float, float, float]:
    """Return -<what becomes of G in the end, G>, <G, G>, and what decay takes of the weight in this step."""
    wide = gradient.double()
    square = float(wide.square().sum())
    if not square:
        return 0.0, 0.0, 0.0
    zero = torch.zeros_like(wide)
    now, average = linear.move(zero, zero, wide)
    later, left = linear.move(zero, average, None)
    norm = float(average.square().sum())
    share = float((left * average).sum()) / norm if norm else 0.0  # what a step leaves of the average
    total = now + later / (1 - share)
    along = -float((total * wide).sum())
    settings = getattr(kind, "settings", ())
    if "betas" in settings and "momentum_decay" not in settings and age:  # its average is divided by 1 - β₁ᵗ
        along *= 1 - share**age
    coupled = float(getattr(linear, "decay", 0.0))
    return along, square, coupled * abs(along) / square - math.log(linear.kappa)
