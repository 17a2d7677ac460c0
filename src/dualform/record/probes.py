"""Probes: measure what happened to a gradient between backward and step, and whether its patterns explain it.

The gradient G of a weight is watched through P = G R with a few fixed random columns R (a bias through itself). Events
of one step are collected as small tensors and resolved together, before the step:

- *before* and *after* each accumulation: the increment of P must be what the recorded patterns predict, Eᵀ(X R);
- between an accumulation and the next event: P may have been multiplied by one factor (clipping, unscaling), or
  cleared; anything else is a change that the identity does not cover.

Pure apart from holding tensors; hooks call it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

COLUMNS = 4
FACTOR_TOLERANCE = 32  # in units of the dtype's eps; see tests/record/test_probes.py for both thresholds
PATTERN_TOLERANCE = 64


@dataclass(slots=True)
class Accumulation:
    """One backward's accumulation into one parameter."""

    micro: int
    before: Tensor | None  # probe of the gradient that was there already
    after: Tensor
    predicted: Tensor
    magnitude: Tensor  # the sum of absolute terms of the prediction, its scale


@dataclass(slots=True)
class Trail:
    """Everything that was measured of one parameter's gradient since its last step."""

    accumulations: list[Accumulation] = field(default_factory=list)
    waiting: Tensor | None = None  # the probe taken before the accumulation in progress


@dataclass(frozen=True, slots=True)
class Resolution:
    """What the trail says: a factor per micro, and what the identity does not cover, if anything.

    A factor is 0 where the gradient was cleared before the step, NaN where no single factor explains the change.
    """

    factors: dict[int, float]
    objection: str | None


def projection(width: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the fixed random columns R, (width, COLUMNS)."""
    generator = torch.Generator().manual_seed(20220627)
    return torch.randn(width, COLUMNS, generator=generator, dtype=torch.float64).to(device=device, dtype=dtype)


def resolve(trail: Trail, final: Tensor | None) -> Resolution:
    """Follow a parameter's gradient from its accumulations to the step.

    Args:
        trail: the accumulations since the last step, in order.
        final: the probe of the gradient as the step sees it; nothing when there is no gradient.
    """
    factors: dict[int, float] = {}
    objections: dict[int | None, str] = {}  # None: a gradient that no recorded accumulation explains
    last: Tensor | None = None
    for event in trail.accumulations:
        _follow(factors, objections, last, event.before)
        factors[event.micro] = 1.0
        unexplained = _unexplained(event)
        if unexplained is not None:
            objections[event.micro] = unexplained
        last = event.after
    _follow(factors, objections, last, final)
    standing = [text for micro, text in objections.items() if micro is None or factors[micro] != 0.0]
    return Resolution(factors, standing[0] if standing else None)


def _follow(
    factors: dict[int, float], objections: dict[int | None, str], last: Tensor | None, now: Tensor | None
) -> None:
    """Apply what happened to the gradient since it was last seen to all factors so far."""
    if last is not None and now is not None and torch.equal(last, now):
        return
    if now is None or not bool(now.any()):  # cleared
        for micro in factors:
            factors[micro] = 0.0
        objections.clear()
        return
    if last is None:
        objections[None] = (
            "a gradient was there that no recorded backward accumulated: it was not cleared after the previous step "
            "(a pattern applied twice), or was set by hand. Call optimizer.zero_grad() in every step"
        )
        return
    if not bool(now.isfinite().all()):
        objections[None] = "its gradient is not finite"
        return
    factor, residual = _factor(last, now)
    if not residual <= FACTOR_TOLERANCE * torch.finfo(now.dtype).eps:
        objections[None] = (
            f"its gradient was changed between backward and step by something other than one factor (residual "
            f"{residual:.1e}): clipping by value, noise, or an edit by hand"
        )
        factor = math.nan
    for micro in factors:
        factors[micro] *= factor


def _factor(last: Tensor, now: Tensor) -> tuple[float, float]:
    """Return the factor f that explains `now = f · last` best, and the relative residual."""
    before, after = last.double(), now.double()
    power = float((before * before).sum())
    if power == 0.0 or not math.isfinite(power):
        return math.nan, math.inf
    factor = float((before * after).sum()) / power
    return factor, float((after - factor * before).norm() / after.norm())


def _unexplained(event: Accumulation) -> str | None:
    """Say how the increment of a gradient differs from what its patterns predict, if it does."""
    increment = event.after.double()
    scale = event.magnitude.double()
    if event.before is not None:
        increment = increment - event.before.double()
        scale = scale + event.before.double().abs()
    difference = float((increment - event.predicted.double()).norm())
    bound = PATTERN_TOLERANCE * torch.finfo(event.after.dtype).eps * float(scale.norm())
    if difference <= bound:
        return None
    relative = difference / max(float(scale.norm()), 1e-300)
    return (
        f"the recorded patterns do not explain its gradient (residual {relative:.1e}): the weight is also used where "
        "it is not seen, such as a regulariser in the loss, a functional call, autocast, or a hook that changes gradients"
    )


def predict_weight(
    values: Sequence[Tensor], keys: Sequence[Tensor], columns: Tensor, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Return Eᵀ(X R) over calls, (d_out, COLUMNS), and the sum of its absolute terms."""
    predicted = magnitude = torch.zeros_like(like)
    for e, x in zip(values, keys, strict=True):
        seen = x.to(columns.dtype) @ columns  # (T, COLUMNS)
        e = e.to(columns.dtype)
        predicted = predicted + e.T @ seen
        magnitude = magnitude + e.abs().T @ seen.abs()
    return predicted, magnitude


def predict_bias(values: Sequence[Tensor], like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of values over calls, (d_out,), and the sum of their absolutes."""
    predicted = magnitude = torch.zeros_like(like)
    for e in values:
        e = e.to(like.dtype)
        predicted = predicted + e.sum(0)
        magnitude = magnitude + e.abs().sum(0)
    return predicted, magnitude
