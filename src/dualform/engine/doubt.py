"""How far each element of a parameter may be from its rebuilt value because training rounded in another way."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dualform.engine.jobs import Fold
from dualform.engine.parameter_steps import Following, GroupsByPart, RetakenStep, optimizer_of
from dualform.engine.source import PatternSource
from dualform.identity.families.optimizer_kind import Spread
from dualform.identity.families.optimizer_replay import OptimizerReplay
from dualform.recording.sinks import RESIDUAL


@dataclass(frozen=True, slots=True)
class Doubt:
    """How far each element of a parameter may be from its rebuilt value without anything being wrong.

    Attributes:
        spread: one standard deviation of what other roundings of the same gradients would have made of the element.
        replayed: the parameter as torch's own steps on the rebuilt gradients left it.
        largest: the most that rounding the element itself at every step can have added up to.

    All of them are in the parameter's shape, float64.
    """

    spread: Tensor
    replayed: Tensor
    largest: Tensor

    def drift(self, rebuilt: Tensor) -> Tensor:
        """Return where rounding has carried each element from its rebuilt value, as the replay shows it.

        A decay of 1 − 1e-5 and an update below half a unit in the last place are rounded to the same side at each step,
        so that this grows with the number of steps, not with its root. No more counts than rounding can do.
        """
        return (self.replayed - rebuilt).clamp(-self.largest, self.largest)

    def apart(self, rebuilt: Tensor, live: Tensor) -> Tensor:
        """Return how far each live element is from all that lies between its rebuilt value and the drift from it."""
        drift = self.drift(rebuilt)
        nearest = live.clamp(rebuilt + drift.clamp(max=0.0), rebuilt + drift.clamp(min=0.0))
        return (live - nearest).abs()


@dataclass(frozen=True, slots=True)
class DoubtOf:
    """Follow the doubt about a parameter's gradients through its steps."""

    def start(self, replay: OptimizerReplay, groups: GroupsByPart | None) -> "_FollowingDoubt":
        """Return the following of one parameter."""
        return _FollowingDoubt(replay)


def fold_doubts(source: PatternSource, names: Collection[str], *, horizon: int) -> Fold[Doubt]:
    """Return the fold that finds how far each of these parameters may be from its rebuilt value.

    Parameters that no step touched, or whose optimizer's own rounding is followed as a term, are left out.
    """
    wanted = [n for n in names if len(source.facts(n)[0].step) and not optimizer_of(source, n).rounds]
    return Fold(tuple(wanted), horizon, DoubtOf())


class _FollowingDoubt(Following[Doubt]):
    """The doubt about one parameter on its way through the steps."""

    def __init__(self, replay: OptimizerReplay) -> None:
        self._replay = replay
        self._shape = replay.parameter.shape
        self._spread: Spread[Any] | None = replay.kind.spread(self._shape)
        self._travelled = torch.zeros(self._shape, dtype=torch.float64)  # sum of |parameter| over the steps

    def after_step(self, taken: RetakenStep) -> None:
        """Add what a step's rounding may do."""
        self._travelled += self._replay.parameter.detach().double().abs()
        if self._spread is not None:
            self._spread.step(taken.linear, taken.settings, self._gradient_doubt(taken))

    def _gradient_doubt(self, taken: RetakenStep) -> Tensor:
        """Return how far each element of a step's gradient may be from the one that autograd found, at random.

        Where autocast rounded the gradient, the logged residual says how far it was from its patterns' sum. The
        rounding of each call's gradient is relative to that gradient, element by element.
        """
        residual = taken.row.get(RESIDUAL, 0.0)
        rounding = torch.zeros(self._shape, dtype=torch.float64)
        coarse = torch.zeros(self._shape, dtype=torch.float64)
        for call, use in taken.calls:
            factor = abs(float(taken.factors[call.micro]))
            if factor:
                rounding += factor * call.rounding(use, self._shape).reshape(self._shape)
                if residual:
                    coarse += factor * call.gradient(use, self._shape).double().reshape(self._shape).abs()
        if residual and (size := float(coarse.norm())):
            rounding += residual / size * coarse
        return rounding

    def result(self) -> Doubt:
        """Return how far the parameter may be from its rebuilt value."""
        replayed = self._replay.parameter.detach()
        # A step rounds a parameter twice: its decay, and the update. Each time it loses half a unit at most.
        largest = torch.finfo(replayed.dtype).eps * self._travelled
        none = torch.zeros_like(self._travelled)
        return Doubt(none if self._spread is None else self._spread.size, replayed.double(), largest)
