"""Probes: measure what happened to a gradient between backward and step, and whether its patterns explain it.

The gradient G of a weight is watched through P = G R with a few fixed random columns R (a bias through itself). Events
of one step are collected as small tensors and resolved together, before the step:

- *before* and *after* each accumulation: the increment of P must be what the recorded patterns predict, Eᵀ(X R);
- between an accumulation and the next event: P may have been multiplied by one factor (clipping, unscaling), or
  cleared; anything else is a change that the identity does not cover.

Differences are compared with the rounding of what P was computed from, ‖G‖ and sum |e| ‖x‖, never with P itself: a
projection that happens to cancel is small, and its rounding is not. sum |e| ‖x‖ costs a pass over keys and values, so
it is found only where ‖G‖ does not explain a difference already. Pure apart from holding tensors; hooks call it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualform.forms import form
from dualform.record.transfer import pack, unpack

Numbers = npt.NDArray[np.float64]
Size = Literal["about", "now", "later"]

COLUMNS = 2
COLUMNS_OF_FEW = 4  # of a gradient with few rows, whose projection may happen to cancel
FEW = 64
MANY = 256  # elements of a probe whose norm tells the gradient's
COARSE = 2.0**-11  # of what a gradient's rounding is relative to, autocast to bfloat16 may take 16 times that
NOT_FINITE = "its gradient is not finite"


@dataclass(slots=True, eq=False)
class Probe:
    """What is kept of a gradient."""

    columns: Tensor  # G R, (d_out, COLUMNS), or a bias's gradient itself, (d_out,)
    norm: Tensor | None = None  # (): the gradient's, where it was taken
    gradient: Tensor | None = None  # itself, where it stays as it is until the probe is resolved
    _numbers: Numbers | None = None
    _size: float | None = None

    @property
    def numbers(self) -> Numbers:
        """All elements of the columns."""
        if self._numbers is None:
            self._numbers = _numbers(self.columns)
        return self._numbers

    @property
    def size(self) -> float:
        """What their rounding is relative to: the norm of the gradient, or about that."""
        if self._size is None:
            self._size = _length(self.numbers) if self.norm is None else float(self.norm)
        return self._size

    @property
    def true_size(self) -> float:
        """The norm of the gradient itself, where it can be had: the columns of one of low rank may happen to cancel."""
        return self.size if self.gradient is None else max(self.size, float(_norm(self.gradient)))

    @property
    def zero(self) -> bool:
        """Whether the gradient was zero."""
        return not self.numbers.any()


@dataclass(slots=True)
class Accumulation:
    """One backward's accumulation into one parameter."""

    micro: int
    before: Probe | None  # of the gradient that was there already
    after: Probe
    predicted: Tensor  # the increment of the columns, as the patterns have it
    sizes: Sequence[Callable[[], float]]  # what the prediction's rounding is relative to, their sum
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


def projection(rows: int, width: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the fixed random columns R for a gradient (rows, width), (width, COLUMNS).

    No element is near zero, so that every single element of the gradient is seen; and ‖G R‖ is about ‖G‖.
    """
    count = COLUMNS_OF_FEW if rows < FEW else COLUMNS
    generator = torch.Generator().manual_seed(20220627)
    drawn = torch.rand(count, width, generator=generator, dtype=torch.float64) * 2 - 1
    found = drawn.sign() * (0.5 + drawn.abs()) / math.sqrt((1 + 1 / 12) * count)
    return found.to(device=device, dtype=dtype).T  # products with this layout are 5 times faster, and rounded less


def probe(gradient: Tensor, columns: Tensor | None, *, size: Size = "about") -> Probe:
    """Take a probe of a gradient: through random columns (d_in, COLUMNS), or of a 1-D one itself.

    Args:
        gradient: (d_out, d_in) or (d_out,)
        columns: (d_in, COLUMNS), or nothing for a gradient of one axis.
        size: whether to tell the gradient's norm from the columns where they are many, `"about"`; to take it `"now"`;
            or `"later"`, if it is needed, because the gradient stays as it is.
    """
    gradient = gradient.detach()
    if columns is None:
        return Probe(gradient.clone())
    taken = gradient @ columns
    # The norm of many elements is about that of the gradient, for a fraction of the reading.
    exact = taken.numel() < MANY or size == "now"
    return Probe(taken, _norm(gradient) if exact else None, gradient if size == "later" else None)


def fetched(seen: list[tuple[Trail, Probe | None]]) -> list[tuple[Trail, Probe | None]]:
    """Return trails and final probes in the CPU's memory: from a GPU all of them at once, which is waited for."""
    everything = [tensor for trail, final in seen for tensor in _tensors(trail, final)]
    if all(tensor.device.type == "cpu" for tensor in everything):
        return seen
    devices = {tensor.device for tensor in everything}
    if len(devices) == 1:
        everything = unpack(pack(everything).cpu(), everything)
    here = iter(everything)

    def probe_here(one: Probe | None) -> Probe | None:
        return None if one is None else Probe(next(here), None if one.norm is None else next(here), one.gradient)

    found = []
    for trail, final in seen:
        events = []
        for event in trail.accumulations:
            before, after = probe_here(event.before), probe_here(event.after)
            assert after is not None, "an accumulation left a gradient"
            events.append(Accumulation(event.micro, before, after, next(here), event.sizes, event.coarse))
        found.append((Trail(trail.width, events, trail.waiting), probe_here(final)))
    return found


def _tensors(trail: Trail, final: Probe | None) -> list[Tensor]:
    """Return every tensor of a trail and a final probe, in the order in which `fetched` takes them."""

    def of(one: Probe | None) -> list[Tensor]:
        return [] if one is None else [one.columns] if one.norm is None else [one.columns, one.norm]

    events = [t for event in trail.accumulations for t in (*of(event.before), *of(event.after), event.predicted)]
    return [*events, *of(final)]


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
            residuals[event.micro] = _difference(event)
        last = event.after
    _follow(factors, objections, last, final, trail.width)
    standing = [text for micro, text in objections.items() if micro is None or factors[micro] != 0.0]
    residual = math.hypot(*(factors[m] * found for m, found in residuals.items())) if residuals else None
    return Resolution(factors, standing[0] if standing else None, residual)


def _follow(
    factors: dict[int, float], objections: dict[int | None, str], last: Probe | None, now: Probe | None, width: int
) -> None:
    """Apply what happened to the gradient since it was last seen to all factors so far."""
    before = None if last is None else last.numbers
    after = None if now is None else now.numbers
    if before is not None and after is not None and np.array_equal(before, after):
        return
    if now is None or after is None or not after.any():  # cleared
        for micro in factors:
            factors[micro] = 0.0
        objections.clear()
        return
    if before is None:
        objections[None] = (
            "a gradient was there that no recorded backward accumulated: it was not cleared after the previous step "
            "(a pattern applied twice), or was set by hand. Call optimizer.zero_grad() in every step"
        )
        return
    if not np.isfinite(after).all():
        objections[None] = NOT_FINITE
        return
    factor, difference = _factor(before, after)
    size, dtype = now.size, now.columns.dtype
    if not difference <= _rounding(size, width, dtype):
        size = now.true_size
    if not difference <= _rounding(size, width, dtype):
        objections[None] = (
            f"its gradient was changed between backward and step by something other than one factor (residual "
            f"{difference / size:.1e}): clipping by value, noise, or an edit by hand"
        )
        factor = math.nan
    for micro in factors:
        factors[micro] *= factor


def _factor(before: Numbers, after: Numbers) -> tuple[float, float]:
    """Return the factor f that explains `after = f · before` best, and what it leaves, ‖after − f · before‖."""
    power = float(before @ before)
    if not math.isfinite(power):
        return math.nan, math.inf
    factor = float(before @ after) / power if power else 1.0
    return factor, _length(after - factor * before)


def _unexplained(event: Accumulation, width: int) -> str | None:
    """Say how the increment of a gradient differs from what its patterns predict, if it does."""
    dtype = event.after.columns.dtype
    difference = _difference(event)
    if not math.isfinite(difference):
        return NOT_FINITE
    if difference <= _rounding(event.after.size, width, dtype):  # ‖G‖ is never more than the patterns' sum |e| ‖x‖
        return None
    predicted = sum(size() for size in event.sizes)
    size = predicted + (0.0 if event.before is None else event.before.size)
    if difference <= _rounding(size, width, dtype):
        return None
    if not predicted:
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
    increment = event.after.numbers
    with np.errstate(invalid="ignore"):  # a difference of infinities is none
        if event.before is not None:
            increment = increment - event.before.numbers
        return _length(increment - _numbers(event.predicted))


def _numbers(columns: Tensor) -> Numbers:
    """Return all elements in float64, whose squares neither underflow nor overflow. They are few: numpy is faster."""
    flat = columns.reshape(-1)
    here = flat if flat.device.type == "cpu" else flat.cpu()
    found: Numbers = here.double().numpy()
    return found


def _length(numbers: Numbers) -> float:
    return math.sqrt(float(numbers @ numbers))


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
    """What a call's patterns add to a parameter's probe, and what its rounding is relative to."""

    columns: Tensor
    size: Callable[[], float]


def predict(roles: Mapping[str, Watching], values: Tensor, keys: Tensor, *, rounding: float) -> dict[str, Prediction]:
    """Return what the patterns of one call predict for each of its parameters, by role.

    All parameters share one product with the values, Eᵀ F with what each meets. Their rounding is relative to
    sum |e| ‖x‖, which is at most ‖E‖ ‖X‖ (or sum |e|, at most ‖E‖ sqrt(T), where the key is 1).

    Args:
        roles: how each parameter is watched, by role.
        values: (T, d_out)
        keys: (T, d_in)
        rounding: how many times more rounding the values carry than autograd's own.
    """
    forms = {role: form(role) for role in roles}
    keys = keys.to(values.dtype) if keys.is_floating_point() else keys
    factors = {role: forms[role].factors(keys, watching.columns) for role, watching in roles.items()}
    joined = [found for found in factors.values() if found is not None]
    together = torch.cat(joined, dim=1).T @ values if joined else values[:0]  # several times faster than Eᵀ F
    products = iter(together.T.split([f.shape[1] for f in joined], dim=1) if joined else ())
    found = {}
    for role, watching in roles.items():
        rows = watching.shape[0]
        if factors[role] is not None:
            columns = forms[role].placed(next(products), rows)
            columns = columns[:, 0] if watching.columns is None else columns
        else:
            gradient = forms[role].gradient(values, keys, watching.shape)
            columns = gradient if watching.columns is None else gradient.flatten(1) @ watching.columns
        found[role] = Prediction(columns, _size(values, None if forms[role].constant_key else keys, rounding))
    return found


def _size(values: Tensor, keys: Tensor | None, rounding: float) -> Callable[[], float]:
    """Return what finds ‖E‖ ‖X‖, or ‖E‖ sqrt(T) without keys, times a factor."""

    def size() -> float:
        return rounding * float(_norm(values)) * (math.sqrt(len(values)) if keys is None else float(_norm(keys)))

    return size


def _norm(tensor: Tensor) -> Tensor:
    """Return the norm of all elements, (), also where squares underflow or overflow (then roughly)."""
    if not tensor.numel():
        return tensor.new_zeros(())
    if tensor.device.type == "cpu" and tensor.is_contiguous():  # a dot product is many times faster there
        flat = tensor.view(-1)
        square = torch.dot(flat, flat)
        limits = torch.finfo(tensor.dtype)
        if limits.smallest_normal / limits.eps**2 < float(square) < limits.max:
            return square.sqrt()
    if tensor.device.type != "cpu" and tensor.dtype != torch.float64:  # one kernel instead of five
        wide: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float64)
        return wide
    norm = torch.linalg.vector_norm(tensor)
    largest = torch.linalg.vector_norm(tensor, ord=torch.inf)
    return torch.where(norm.isinf(), largest * math.sqrt(tensor.numel()), torch.maximum(norm, largest))
