"""The history of a gradient between backward and step: what happened to it, and whether its patterns explain it.

The gradient G of a weight is measured as P = G R with a few fixed random columns R (a bias's gradient is taken whole).
The events of one step are collected as small tensors and resolved together, before the step:

- *before* and *after* each accumulation: the increment of P must be what the recorded patterns predict, Eᵀ(X R);
- between an accumulation and the next event: P may have been multiplied by one factor (clipping, unscaling), or
  cleared; anything else is a change that the identity does not cover.

Differences are compared with the rounding of what P was computed from, ‖G‖ and sum |e| ‖x‖, never with P itself: a
projection that happens to cancel is small, and its rounding is not. sum |e| ‖x‖ costs a pass over keys and values, so
it is found only where ‖G‖ does not explain a difference already. Pure apart from holding tensors; hooks call it.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dualform.recording.packing import pack, unpack
from dualform.recording.probes import Float64Array, Probe, as_float64, length

NOT_FINITE = "its gradient is not finite"
CPU = torch.device("cpu")


@dataclass(slots=True)
class Accumulation:
    """One backward's accumulation into one parameter."""

    micro: int
    before: Probe | None  # of the gradient that was there already
    after: Probe
    predicted: Tensor  # the increment of the columns, as the patterns have it
    sizes: Sequence[Callable[[], float]]  # what the prediction's rounding is relative to, their sum
    coarse: bool = False  # whether autograd rounded it to a coarser dtype than the parameter's
    patterns: int = 0  # whose sum it is, which rounds at every one of them


@dataclass(slots=True)
class GradientHistory:
    """Everything that was measured of one parameter's gradient since the parameter's last step."""

    width: int  # d_in; 1 for a bias
    accumulations: list[Accumulation] = field(default_factory=list)
    waiting: Probe | None = None  # taken before the accumulation in progress


@dataclass(frozen=True, slots=True)
class Resolution:
    """What a history says: a factor per micro, and what the identity does not cover, if anything.

    A factor is 0 where the gradient was cleared before the step, NaN where no single factor explains the change.
    """

    factors: dict[int, float]
    objection: str | None
    residual: float | None = None  # ‖gradient − its patterns' sum‖ at the step, where autograd rounded coarsely


def fetch_histories(seen: list[tuple[GradientHistory, Probe | None]]) -> list[tuple[GradientHistory, Probe | None]]:
    """Return histories and final probes in the CPU's memory: all of them in one copy, which is waited for."""
    everything = [tensor for history, final in seen for tensor in _tensors(history, final)]
    if all(tensor.device.type == "cpu" for tensor in everything):
        return seen
    devices = {tensor.device for tensor in everything}
    if len(devices) == 1:
        everything = unpack(pack(everything).cpu(), everything)
    here = iter(everything)

    def probe_here(one: Probe | None) -> Probe | None:
        return None if one is None else Probe(next(here), None if one.norm is None else next(here), one.gradient)

    found = []
    for history, final in seen:
        events = []
        for event in history.accumulations:
            before, after = probe_here(event.before), probe_here(event.after)
            assert after is not None, "an accumulation left a gradient"
            predicted = next(here)
            events.append(dataclasses.replace(event, before=before, after=after, predicted=predicted))
        found.append((GradientHistory(history.width, events, history.waiting), probe_here(final)))
    return found


def _tensors(history: GradientHistory, final: Probe | None) -> list[Tensor]:
    """Return every tensor of a history and a final probe, in the order in which `fetch_histories` takes them."""

    def of(one: Probe | None) -> list[Tensor]:
        return [] if one is None else [one.columns] if one.norm is None else [one.columns, one.norm]

    events = [t for event in history.accumulations for t in (*of(event.before), *of(event.after), event.predicted)]
    return [*events, *of(final)]


def resolve_all(seen: Sequence[tuple[GradientHistory, Probe | None]]) -> list[Resolution]:
    """Resolve the histories of all parameters of a step, as `resolve` does each; the usual ones all at once."""
    usual = [i for i, (history, final) in enumerate(seen) if _is_usual(history, final)]
    histories, finals = [seen[i][0] for i in usual], [final for i in usual if (final := seen[i][1]) is not None]
    factors = dict(zip(usual, _factors(histories, finals), strict=True)) if len(usual) > 1 else {}
    resolutions = []
    for i, (history, final) in enumerate(seen):
        factor = factors.get(i)
        resolutions.append(
            resolve(history, final) if factor is None else Resolution({history.accumulations[0].micro: factor}, None)
        )
    return resolutions


def _is_usual(history: GradientHistory, final: Probe | None) -> bool:
    """Say whether a gradient was cleared, accumulated once, in its own dtype, and is there at the step."""
    if final is None or len(history.accumulations) != 1:
        return False
    event, columns = history.accumulations[0], final.columns
    known = columns.device == CPU and columns.dtype in (torch.float32, torch.float64)  # to numpy
    fits = event.predicted.shape == columns.shape and columns.numel() > 0
    return known and fits and event.before is None and not event.coarse


def _factors(histories: Sequence[GradientHistory], finals: Sequence[Probe]) -> list[float | None]:
    """Return the factor of each gradient that its patterns explain, and that was changed by one factor at most.

    None for other gradients, and for those whose rounding needs a closer look: `resolve` finds what they are.
    """
    before = _Joined([history.accumulations[0].after.columns for history in histories])
    predicted = _Joined([history.accumulations[0].predicted for history in histories])
    after = _Joined([final.columns for final in finals])
    with np.errstate(all="ignore"):  # what is not finite is within no bound
        same = np.logical_and.reduceat(before.elements == after.elements, after.begins)
        factors = np.where(same, 1.0, before.dot(after.elements) / before.dot(before.elements))
        changed = after.norms(after.elements - before.times(factors))
        missed = before.norms(before.elements - predicted.elements)
        one_factor = same | (changed <= _roundings(after.norms(), histories, finals))
        explained = missed <= _roundings(before.norms(), histories, finals)
        fine = one_factor & explained & (factors != 0.0)
    return [float(factor) if is_fine else None for factor, is_fine in zip(factors, fine, strict=True)]


class _Joined:
    """Several small tensors' elements one after the other, in float64."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.counts = [tensor.numel() for tensor in tensors]
        self.begins = np.cumsum([0, *self.counts[:-1]])
        arrays = [tensor.numpy().ravel() for tensor in tensors]
        self.elements: Float64Array = np.concatenate(arrays, dtype=np.float64)

    def dot(self, others: Float64Array) -> Float64Array:
        """Return the dot product of each tensor with its part of other elements."""
        found: Float64Array = np.add.reduceat(self.elements * others, self.begins)
        return found

    def norms(self, elements: Float64Array | None = None) -> Float64Array:
        """Return the norm of each tensor, or of each part of as many other elements."""
        elements = self.elements if elements is None else elements
        return np.sqrt(np.add.reduceat(elements * elements, self.begins))

    def times(self, factors: Float64Array) -> Float64Array:
        """Return all elements, each tensor's times its factor."""
        return np.repeat(factors, self.counts) * self.elements


def resolve(history: GradientHistory, final: Probe | None) -> Resolution:
    """Follow a parameter's gradient from its accumulations to the step.

    Args:
        history: the accumulations since the last step, in order.
        final: the probe of the gradient as the step sees it; nothing when there is no gradient.
    """
    factors: dict[int, float] = {}
    objections: dict[int | None, str] = {}  # None: a gradient that no recorded accumulation explains
    residuals: dict[int, float] = {}
    last: Probe | None = None
    for event in history.accumulations:
        _follow(factors, objections, last, event.before, history.width)
        factors[event.micro] = 1.0
        unexplained = _unexplained(event, history.width)
        if unexplained is not None:
            objections[event.micro] = unexplained
        if event.coarse:
            residuals[event.micro] = _difference(event)
        last = event.after
    _follow(factors, objections, last, final, history.width)
    residual = math.hypot(*(factors[m] * found for m, found in residuals.items())) if residuals else None
    standing = [text for micro, text in objections.items() if micro is None or factors[micro] != 0.0]
    return Resolution(factors, standing[0] if standing else None, residual)


def _follow(
    factors: dict[int, float], objections: dict[int | None, str], last: Probe | None, now: Probe | None, width: int
) -> None:
    """Apply what happened to the gradient since it was last seen to all factors so far."""
    before = None if last is None else last.elements
    after = None if now is None else now.elements
    if before is not None and after is not None and np.array_equal(before, after):
        return
    if now is None or after is None or now.zero:  # cleared
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


def _factor(before: Float64Array, after: Float64Array) -> tuple[float, float]:
    """Return the factor f that explains `after = f · before` best, and what it leaves, ‖after − f · before‖."""
    power = float(before @ before)
    if not math.isfinite(power):
        return math.nan, math.inf
    factor = float(before @ after) / power if power else 1.0
    return factor, length(after - factor * before)


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
    if difference <= _rounding(size, width, dtype, terms=event.patterns):
        return None
    if not predicted:
        return (
            "no recorded pattern explains its gradient: its layer was not seen in the forward pass, which was a "
            "functional call, began before the recording, or was compiled before it (call torch._dynamo.reset())"
        )
    return (
        f"the recorded patterns do not explain its gradient (residual {difference / size:.1e}): it is also used where "
        "it is not seen, such as a regulariser in the loss or a functional call; or a hook "
        "or an edit by hand changes gradients; or the GPU computed it in TF32 (set torch.backends.cudnn.allow_tf32 and "
        "torch.backends.cuda.matmul.allow_tf32 to False)"
    )


def _difference(event: Accumulation) -> float:
    """Return ‖increment − prediction‖ of the columns."""
    increment = event.after.elements
    with np.errstate(invalid="ignore"):  # a difference of infinities is none
        if event.before is not None:
            increment = increment - event.before.elements
        return length(increment - as_float64(event.predicted))


def _rounding(size: float, width: int, dtype: torch.dtype, *, terms: int = 0) -> float:
    """Return how large a difference rounding explains.

    The rounding of a product grows with the square root of its width; the bound is 4 times the worst of 10,000 random
    gradients (tests/recording/test_probes.py). That of a sum over patterns, which autograd may add up one by one, grows
    with the root of their number (`terms`), and more where all have the same sign. Below the last term products of
    gradients underflow.
    """
    limits = torch.finfo(dtype)
    relative = 16 + 2 * math.sqrt(width) + 4 * math.sqrt(terms)
    return relative * limits.eps * size + limits.smallest_normal / limits.eps


def _roundings(sizes: Float64Array, histories: Sequence[GradientHistory], finals: Sequence[Probe]) -> Float64Array:
    """Return how large a difference rounding explains, for several at once."""
    several = zip(sizes, histories, finals, strict=True)
    return np.array([_rounding(float(size), history.width, final.columns.dtype) for size, history, final in several])
