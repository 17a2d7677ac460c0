"""Probes: measure what happened to a gradient between backward and step, and whether its patterns explain it.

The gradient G of a weight is watched through P = G R with a few fixed random columns R (a bias through itself). Events
of one step are collected as small tensors and resolved together, before the step:

- *before* and *after* each accumulation: the increment of P must be what the recorded patterns predict, Eᵀ(X R);
- between an accumulation and the next event: P may have been multiplied by one factor (clipping, unscaling), or
  cleared; anything else is a change that the identity does not cover.

Differences are compared with the rounding of what P was computed from, ‖G‖ and sum |e| ‖x‖, never with P itself: a
projection that happens to cancel is small, and its rounding is not. Pure apart from holding tensors; hooks call it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dualform.forms import form

COLUMNS = 4
COARSE = 2.0**-11  # of what a gradient's rounding is relative to, autocast to bfloat16 may take 16 times that
NOT_FINITE = "its gradient is not finite"


@dataclass(frozen=True, slots=True)
class Probe:
    """What is kept of a gradient."""

    columns: Tensor  # G R, (d_out, COLUMNS), or a bias's gradient itself, (d_out,)
    size: Tensor  # (): what their rounding is relative to

    @property
    def zero(self) -> bool:
        """Whether the gradient was zero."""
        return not bool(self.columns.any())


@dataclass(slots=True)
class Accumulation:
    """One backward's accumulation into one parameter."""

    micro: int
    before: Probe | None  # of the gradient that was there already
    after: Probe
    predicted: Tensor  # the increment of the columns, as the patterns have it
    size: Tensor  # (): what the prediction's rounding is relative to
    coarse: bool = False  # whether autograd rounded it to a coarser dtype than the parameter's


@dataclass(slots=True)
class Trail:
    """Everything that was measured of one parameter's gradient since its last step."""

    width: int  # d_in; 1 for a bias
    accumulations: list[Accumulation] = field(default_factory=list)
    waiting: Probe | None = None  # taken before the accumulation in progress


@dataclass(frozen=True, slots=True)
class Resolution:
    """What the trail says: a factor per micro, and what the identity does not cover, if anything.

    A factor is 0 where the gradient was cleared before the step, NaN where no single factor explains the change.
    """

    factors: dict[int, float]
    objection: str | None
    residual: float | None = None  # ‖gradient − its patterns' sum‖ at the step, where autograd rounded coarsely


def projection(width: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the fixed random columns R, (width, COLUMNS)."""
    generator = torch.Generator().manual_seed(20220627)
    rows = torch.randn(COLUMNS, width, generator=generator, dtype=torch.float64)
    return rows.to(device=device, dtype=dtype).T  # products with this layout are 5 times faster, and rounded less


def probe(gradient: Tensor, columns: Tensor | None) -> Probe:
    """Take a probe of a gradient: through random columns (d_in, COLUMNS), or of a 1-D one itself."""
    gradient = gradient.detach()
    size = _norm(gradient.reshape(1, -1))[0]
    if columns is None:
        return Probe(gradient.clone(), size)
    return Probe(gradient @ columns, size * math.sqrt(COLUMNS))


def resolve(trail: Trail, final: Probe | None) -> Resolution:
    """Follow a parameter's gradient from its accumulations to the step.

    Args:
        trail: the accumulations since the last step, in order.
        final: the probe of the gradient as the step sees it; nothing when there is no gradient.
    """
    factors: dict[int, float] = {}
    objections: dict[int | None, str] = {}  # None: a gradient that no recorded accumulation explains
    residuals: dict[int, float] = {}
    last: Probe | None = None
    for event in trail.accumulations:
        _follow(factors, objections, last, event.before, trail.width)
        factors[event.micro] = 1.0
        unexplained = _unexplained(event, trail.width)
        if unexplained is not None:
            objections[event.micro] = unexplained
        if event.coarse:
            residuals[event.micro] = _difference(event) / (
                1.0 if event.after.columns.dim() == 1 else math.sqrt(COLUMNS)
            )
        last = event.after
    _follow(factors, objections, last, final, trail.width)
    standing = [text for micro, text in objections.items() if micro is None or factors[micro] != 0.0]
    residual = math.hypot(*(factors[m] * found for m, found in residuals.items())) if residuals else None
    return Resolution(factors, standing[0] if standing else None, residual)


def _follow(
    factors: dict[int, float], objections: dict[int | None, str], last: Probe | None, now: Probe | None, width: int
) -> None:
    """Apply what happened to the gradient since it was last seen to all factors so far."""
    if last is not None and now is not None and torch.equal(last.columns, now.columns):
        return
    if now is None or now.zero:  # cleared
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
    if not bool(now.columns.isfinite().all()):
        objections[None] = NOT_FINITE
        return
    factor, difference = _factor(last, now)
    size = float(now.size)
    if not difference <= _rounding(size, width, now.columns.dtype):
        objections[None] = (
            f"its gradient was changed between backward and step by something other than one factor (residual "
            f"{difference / size:.1e}): clipping by value, noise, or an edit by hand"
        )
        factor = math.nan
    for micro in factors:
        factors[micro] *= factor


def _factor(last: Probe, now: Probe) -> tuple[float, float]:
    """Return the factor f that explains `now = f · last` best, and what it leaves, ‖now − f · last‖."""
    before, after = last.columns.double(), now.columns.double()
    power = float((before * before).sum())
    if not math.isfinite(power):
        return math.nan, math.inf
    factor = float((before * after).sum()) / power if power else 1.0
    return factor, float((after - factor * before).norm())


def _unexplained(event: Accumulation, width: int) -> str | None:
    """Say how the increment of a gradient differs from what its patterns predict, if it does."""
    size = float(event.size) + (0.0 if event.before is None else float(event.before.size))
    difference = _difference(event)
    if not math.isfinite(difference):
        return NOT_FINITE
    if difference <= _rounding(size, width, event.after.columns.dtype):
        return None
    if not float(event.size):
        return (
            "no recorded pattern explains its gradient: its layer was not seen in the forward pass, which was a "
            "functional call, began before the recording, or was compiled before it (call torch._dynamo.reset())"
        )
    return (
        f"the recorded patterns do not explain its gradient (residual {difference / size:.1e}): it is also used where "
        "it is not seen, such as a regulariser in the loss, a functional call, or a hook that "
        "changes gradients; or the GPU computed it in TF32 (set torch.backends.cudnn.allow_tf32 and "
        "torch.backends.cuda.matmul.allow_tf32 to False)"
    )


def _difference(event: Accumulation) -> float:
    """Return ‖increment − prediction‖ of the columns."""
    increment = event.after.columns.double()
    if event.before is not None:
        increment = increment - event.before.columns.double()
    return float((increment - event.predicted.double()).norm())


def _rounding(size: float, width: int, dtype: torch.dtype) -> float:
    """Return how large a difference rounding explains.

    The rounding of a product grows with the square root of its width; the bound is 4 times the worst of 10,000 random
    gradients (tests/record/test_probes.py). Below the last term products of gradients underflow.
    """
    limits = torch.finfo(dtype)
    return (16 + 2 * math.sqrt(width)) * limits.eps * size + limits.smallest_normal / limits.eps


@dataclass(frozen=True, slots=True)
class Watching:
    """How a parameter is watched: through random columns (d_in, COLUMNS), or whole where it has one axis."""

    columns: Tensor | None
    shape: Sequence[int]


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a call's patterns add to a parameter's probe, and what its rounding is relative to, ()."""

    columns: Tensor
    size: Tensor


def predict(roles: Mapping[str, Watching], values: Tensor, keys: Tensor, *, rounding: float) -> dict[str, Prediction]:
    """Return what the patterns of one call predict for each of its parameters, by role.

    All parameters share two products with the values, which are read as rarely as possible: Eᵀ F with what each meets,
    and |E|ᵀ ‖x‖ for the rounding, sum |e| ‖x‖ (or sum |e| where the key is 1).

    Args:
        roles: how each parameter is watched, by role.
        values: (T, d_out)
        keys: (T, d_in)
        rounding: how many times more rounding the values carry than autograd's own.
    """
    forms = {role: form(role) for role in roles}
    keys = keys.to(values.dtype) if keys.is_floating_point() else keys
    ones = values.new_ones(len(values))
    reaches = [ones if one.constant_key else _norm(one.part(values, keys)[1]) for one in forms.values()]
    reach = values.abs().T @ torch.stack(reaches, dim=1)  # (d_out, roles)
    factors = {role: forms[role].factors(keys, watching.columns) for role, watching in roles.items()}
    joined = [found for found in factors.values() if found is not None]
    products = iter((values.T @ torch.cat(joined, dim=1)).split([f.shape[1] for f in joined], dim=1) if joined else ())
    found = {}
    for i, (role, watching) in enumerate(roles.items()):
        rows = watching.shape[0]
        if factors[role] is not None:
            columns = forms[role].placed(next(products), rows)
            columns = columns[:, 0] if watching.columns is None else columns
        else:
            gradient = forms[role].gradient(values, keys, watching.shape)
            columns = gradient if watching.columns is None else gradient.flatten(1) @ watching.columns
        size = forms[role].placed(reach[:, i : i + 1], rows).double().norm()
        found[role] = Prediction(columns, size * rounding * (1.0 if watching.columns is None else math.sqrt(COLUMNS)))
    return found


def _norm(rows: Tensor) -> Tensor:
    """Return the norm of each row, (T, d) -> (T,), also where its squares underflow or overflow (then roughly)."""
    if not rows.numel():
        return rows.new_zeros(len(rows))
    if rows.device.type == "cpu":  # sums of squares are many times faster there, where they are in range
        flat = rows.reshape(-1)
        squares = torch.dot(flat, flat)[None] if len(rows) == 1 else (rows * rows).sum(dim=1)
        limits = torch.finfo(rows.dtype)
        odd = ~((squares > limits.smallest_normal / limits.eps**2) & (squares < limits.max))
        if not bool(odd.any()) or not bool(rows[odd].any()):
            return squares.sqrt()
    norm = torch.linalg.vector_norm(rows, dim=1)
    largest = torch.linalg.vector_norm(rows, ord=torch.inf, dim=1)
    return torch.where(norm.isinf(), largest * math.sqrt(rows.shape[1]), torch.maximum(norm, largest))
