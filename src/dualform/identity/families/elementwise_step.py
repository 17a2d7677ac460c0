"""One step of the elementwise family, as a linear map of shares.

The three lines of `dualform.identity.families.elementwise` with a step's numbers and matrices in them, for one share or
for the shares of many parameters by the same few kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dualform.identity.families.optimizer_kind import Move, StepMap, StepMatrix


@dataclass(frozen=True, slots=True)
class ElementwiseStep(StepMap):
    """One step, as the numbers and matrices of its three lines; SGD's are numbers throughout."""

    alpha: float = 0.0
    beta: Tensor | float = 0.0
    kappa: float = 1.0
    on_average: Tensor | float = 0.0  # P
    on_gradient: Tensor | float = 0.0  # Q
    decay: float = 0.0
    sign: float = 1.0
    reach: float = 1.0  # how far one gradient moves an element at most, over all steps, in learning rates
    corrected: float = 0.0  # steps t by which the average is divided by 1 − αᵗ; 0 where it is not

    def step(self, share: Tensor, average: Tensor, gradient: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return a share of W' and of m'."""
        if gradient is None:
            moved = self.decay * share if self.decay else None
        else:
            moved = self.sign * gradient
            if self.decay:
                moved = moved + self.decay * share
        average = self.alpha * average
        if moved is not None:
            average = average + self.beta * moved
        after = self.kappa * share - self.on_average * average
        return (after if moved is None else after - self.on_gradient * moved), average

    @property
    def moves_average(self) -> bool:
        """Whether a step changes the average."""
        return self.alpha != 1.0 or isinstance(self.beta, Tensor) or self.beta != 0.0

    @property
    def matrix(self) -> StepMatrix | None:
        """The step as numbers; None where one of β, P, Q is a matrix."""
        if isinstance(self.on_average, Tensor) or isinstance(self.on_gradient, Tensor) or isinstance(self.beta, Tensor):
            return None
        beta, on_average, on_gradient = (float(x) for x in (self.beta, self.on_average, self.on_gradient))
        direct = on_average * beta + on_gradient  # what W' takes of d
        return StepMatrix(
            weight=(self.kappa - direct * self.decay, -on_average * self.alpha),
            average=(beta * self.decay, self.alpha),
            gradient=(-direct * self.sign, beta * self.sign),
        )

    @property
    def lerp(self) -> tuple[float, float] | None:
        """α and sign · β, where β is a number and the step takes d by way of the average alone, without decay."""
        if isinstance(self.beta, Tensor) or isinstance(self.on_gradient, Tensor) or self.on_gradient or self.decay:
            return None
        return self.alpha, self.sign * self.beta

    @classmethod
    def follow_all(cls, moves: Sequence[Move["ElementwiseStep"]]) -> None:
        """Move all shares in place: those whose steps have the same numbers by one kernel for each product."""
        alike: dict[tuple[Any, ...], list[Move[ElementwiseStep]]] = {}
        numbers: tuple[Any, ...] = ()
        last: ElementwiseStep | None = None
        for move in moves:
            step = move.linear
            if step is not last:
                last = step
                numbers = (
                    step.alpha,
                    step.kappa,
                    step.decay,
                    step.sign,
                    "matrix" if isinstance(step.beta, Tensor) else step.beta,
                    "matrix" if isinstance(step.on_average, Tensor) else step.on_average,
                    "matrix" if isinstance(step.on_gradient, Tensor) else step.on_gradient,
                )
            # Kernels for many tensors take no matrix that stands for several shares of one tensor.
            stacked = isinstance(step.on_average, Tensor) and move.shares[0].dim() != step.on_average.dim()
            alike.setdefault((*numbers, move.averages_moved, move.scale, stacked), []).append(move)
        for group in alike.values():
            _follow_together(group)

    def bias_correction(self, alpha: float) -> float:
        """Return 1 − αᵗ where the step divides the average by it."""
        return 1 - alpha**self.corrected if self.corrected else 1.0


def _follow_together(moves: Sequence[Move[ElementwiseStep]]) -> None:
    """Follow steps that are alike but for their matrices."""
    first = moves[0].linear
    shares = [share for move in moves for share in move.shares]
    averages = [average for move in moves for average in move.averages]
    owners = [move.linear for move in moves for _ in move.shares]
    gradients = [gradient for move in moves for gradient in move.gradients]
    places = [place for place, gradient in enumerate(gradients) if gradient is not None]
    moved = [gradient for gradient in gradients if gradient is not None]
    if first.decay:
        decayed = list(torch._foreach_mul(shares, first.decay))
        if moved:
            torch._foreach_add_([decayed[place] for place in places], moved, alpha=first.sign)
        moved, places = decayed, list(range(len(shares)))
    elif first.sign != 1.0 and moved:
        moved = list(torch._foreach_mul(moved, first.sign))
    with_gradient = [owners[place] for place in places]
    if first.moves_average and not moves[0].averages_moved:
        _move_averages(averages, places, moved, [one.beta for one in with_gradient], first.alpha)
    scale = moves[0].scale
    if scale is None and first.kappa != 1.0:
        torch._foreach_mul_(shares, first.kappa)
    _add_products(shares, averages, [one.on_average for one in owners], by=-1 / (scale or 1.0))
    _add_products([shares[place] for place in places], moved, [one.on_gradient for one in with_gradient], by=-1.0)


def _move_averages(
    averages: list[Tensor], places: Sequence[int], moved: list[Tensor], betas: Sequence[Tensor | float], alpha: float
) -> None:
    """Multiply averages by α, and add β times what moved those at some places: as one lerp where α is 1 − β."""
    taking = [averages[place] for place in places]
    if moved and not isinstance(betas[0], Tensor) and alpha == 1 - betas[0]:
        torch._foreach_lerp_(taking, moved, betas[0])
        here = set(places)
        averages, moved = [one for place, one in enumerate(averages) if place not in here], []
    if averages and alpha != 1.0:
        torch._foreach_mul_(averages, alpha)
    _add_products(taking, moved, betas)


def _is_not_zero(factor: Tensor | float) -> bool:
    return isinstance(factor, Tensor) or factor != 0.0


def _add_products(
    totals: list[Tensor], terms: list[Tensor], factors: Sequence[Tensor | float], *, by: float = 1.0
) -> None:
    """Add each term times a factor and a number to its total, in place; factors are all matrices, or all one number."""
    if not terms or not _is_not_zero(factors[0]):
        return
    matrices = [factor for factor in factors if isinstance(factor, Tensor)]
    if matrices:
        torch._foreach_addcmul_(totals, terms, matrices, value=by)
    else:
        torch._foreach_add_(totals, terms, alpha=by * float(factors[0]))
