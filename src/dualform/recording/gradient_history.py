"""The history of a gradient between its backwards and the step: by which factor each backward reaches the step.

The gradient is seen through samples (`gradient_samples`): before and after each backward that adds to it, and at the
step. Between two moments at which nothing was accumulated it may have been multiplied by one factor (clipping,
unscaling), or cleared; anything else is a change that the identity does not cover. Whether the patterns explain
the gradient is not asked here. Pure apart from holding tensors.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualform.recording.gradient_samples import GradientSample
from dualform.recording.packing import pack, unpack
from dualform.recording.probes import Float64Array, length
from dualform.threads import one_thread

NOT_FINITE = "its gradient is not finite"
NOT_CLEARED = (
    "a gradient was there that no recorded backward accumulated: it was not cleared after the previous step (a pattern "
    "applied twice), or was set by hand. Call optimizer.zero_grad() in every step"
)
BLIND = "a sample of its gradient is zero although the gradient is not"
SAMPLE_ROUNDING = 16
"""Units of rounding by which elements may differ from one factor times their values before: several factors may follow
each other (unscaling, clipping), and each rounds every element once."""

COMMON_ROUNDING = 2
"""Units of rounding by which an element may differ from the factor of all gradients times its value before: it was
rounded once, and so was the factor."""


@dataclass(slots=True)
class Accumulation:
    """One backward's accumulation into one parameter's gradient."""

    micro: int
    before: GradientSample | None  # of the gradient that was there already
    after: GradientSample
    reduced: GradientSample | None = None  # of this process's rows of a divided gradient, as far as it was reduced


@dataclass(slots=True)
class GradientHistory:
    """The samples of one parameter's gradient since its last step."""

    width: int  # d_in; 1 for a bias
    accumulations: list[Accumulation] = field(default_factory=list)
    waiting: GradientSample | None = None  # taken before the accumulation in progress
    reduced: GradientSample | None = None  # the same of a divided gradient's rows, as far as they were reduced

    @property
    def projected(self) -> bool | None:
        """How the next sample has to be taken, to be compared with the last one; None where there is none."""
        return self.accumulations[-1].after.projected if self.accumulations else None


@dataclass(frozen=True, slots=True)
class Factors:
    """What happened to a gradient, as its samples show it.

    Attributes:
        of: micro -> what its gradient was multiplied with by the time of the step; 0 where it was cleared, NaN where no
            single factor explains what happened.
        objection: what the identity does not cover, in words; None if there is nothing of the kind.
        blind: whether the objection is only that a sample showed nothing, so that the whole gradient has to be read.
    """

    of: dict[int, float]
    objection: str | None = None
    blind: bool = False


Seen = tuple[GradientHistory, GradientSample | None]
"""A history, and the sample of the gradient as the step sees it; None if there is no gradient then."""


def fetch_histories(seen: Sequence[Seen]) -> list[Seen]:
    """Return histories and final samples in the CPU's memory: from a GPU all of them at once, which is waited for."""
    tensors = tensors_of(seen)
    if len({tensor.device for tensor in tensors}) == 1:
        return with_tensors(seen, iter(unpack(pack(tensors).cpu(), tensors)))
    return with_tensors(seen, iter([tensor.cpu() for tensor in tensors]))


def tensors_of(seen: Sequence[Seen]) -> list[Tensor]:
    """Return the tensors of all samples of histories, in the order in which `with_tensors` takes them."""
    samples = [sample for history, final in seen for sample in _samples(history, final)]
    return [tensor for sample in samples for tensor in (sample.elements, sample.norm) if tensor is not None]


def with_tensors(seen: Sequence[Seen], here: Iterator[Tensor]) -> list[Seen]:
    """Return histories and final samples with other tensors in place of their own."""
    samples = [sample for history, final in seen for sample in _samples(history, final)]
    found = {
        id(one): GradientSample(next(here), one.projected, None if one.norm is None else next(here), one.gradient)
        for one in samples
    }

    def at_hand(one: GradientSample | None) -> GradientSample | None:
        return None if one is None else found[id(one)]

    return [
        (
            GradientHistory(
                history.width,
                [
                    Accumulation(e.micro, at_hand(e.before), found[id(e.after)], at_hand(e.reduced))
                    for e in history.accumulations
                ],
            ),
            at_hand(final),
        )
        for history, final in seen
    ]


def _samples(history: GradientHistory, final: GradientSample | None) -> list[GradientSample]:
    found = [sample for event in history.accumulations for sample in (event.before, event.after, event.reduced)]
    return [sample for sample in (*found, final) if sample is not None]


def follow_all(seen: Sequence[Seen]) -> list[Factors]:
    """Follow the gradients of all parameters of a step, as `follow` does; those with nothing unusual all at once."""
    usual = [i for i, (history, final) in enumerate(seen) if _is_usual(history, final)]
    found = dict(zip(usual, _common_case([seen[i] for i in usual]), strict=True)) if usual else {}
    return [found.get(i) or follow(*one) for i, one in enumerate(seen)]


def are_usual(seen: Sequence[Seen]) -> bool:
    """Say whether all gradients were accumulated once, are there at the step with norms, and are of one dtype.

    The dtype is one that numpy knows, too.
    """
    dtypes = {final.elements.dtype for _, final in seen if final is not None}
    return dtypes in ({torch.float32}, {torch.float64}) and all(
        _is_usual(history, final) and final is not None and final.norm is not None for history, final in seen
    )


def _is_usual(history: GradientHistory, final: GradientSample | None) -> bool:
    """Say whether a gradient was cleared, accumulated once, and is there at the step, seen in the same way."""
    if final is None or len(history.accumulations) != 1 or history.accumulations[0].before is not None:
        return False
    after = history.accumulations[0].after
    return (
        after.projected == final.projected
        and after.norm is None
        and after.elements.shape == final.elements.shape
        and after.elements.dtype == final.elements.dtype
        and final.elements.shape[0] > 0
    )


def follow_views(
    histories: Sequence[GradientHistory | None], views: Sequence[Tensor | None], gradients: Sequence[Tensor | None]
) -> list[Factors] | None:
    """Follow the gradients of all parameters of a step by views of their samples, none of which is taken.

    None where any gradient is there that was not accumulated by the step's first backward alone, or was changed by more
    than one factor; `follow_all` says what is to be said then.

    Args:
        histories: of each gradient; None where nothing was accumulated.
        views: each gradient's sample as it is in the gradient's memory now; None where it has to be taken.
        gradients: the gradients; None where there is none.
    """
    for history, view, gradient in zip(histories, views, gradients, strict=True):
        if history is None and gradient is None:
            continue
        if history is None or view is None or not history.accumulations:
            return None
        only, after = history.accumulations[0], history.accumulations[-1].after
        if after is not only.after or only.micro or only.before is not None:
            return None
        if after.projected or after.norm is not None or after.elements.shape != view.shape:
            return None
    here = [view for view in views if view is not None]
    if not here:
        return None
    before = [history.accumulations[0].after.elements for history in histories if history is not None]
    nothing, untouched = Factors({}), Factors({0: 1.0})
    with one_thread():  # samples are small
        then, now = torch.cat(before), torch.cat(here)
        if then.numpy().tobytes() == now.numpy().tobytes() and math.isfinite(now.sum()):
            return [nothing if history is None else untouched for history in histories]
    earlier, later = then.double().numpy(), now.double().numpy()
    common = common_factor(earlier, later, torch.finfo(now.dtype).eps)
    if common is not None:
        clipped = Factors({0: common})
        return [nothing if history is None else clipped for history in histories]
    counts = [view.shape[0] for view in here]
    eps, tiny = _limits(here)
    none, absent = np.zeros(len(here)), np.full(len(here), math.nan)
    factors, fine = _one_factor_each(earlier, later, counts, absent, eps, tiny, none)
    if not fine.all():
        return None
    found = iter(factors)
    return [nothing if history is None else Factors({0: float(next(found))}) for history in histories]


def common_factor(before: Float64Array, now: Float64Array, eps: float) -> float | None:
    """Return the one factor that the samples of all gradients were multiplied with, as clipping does; None if none was.

    It explains every single element up to the rounding of one product, which is more than is asked of a sample whose
    factor is found by itself. Gradients whose factors differ are left to `_one_factor_each`.

    Args:
        before: the samples after their backward, one after the other.
        now: the same at the step.
        eps: the relative rounding of the gradients.
    """
    power = float(before @ before)
    factor = float(before @ now) / power if power else math.nan
    if not math.isfinite(factor) or factor == 0.0:
        return None
    if np.any(np.abs(now - factor * before) > COMMON_ROUNDING * eps * np.abs(now)):
        return None
    return factor


def _limits(tensors: Sequence[Tensor]) -> tuple[Float64Array, Float64Array]:
    """Return the relative rounding, and the smallest normal number, of each tensor's dtype."""
    limits = [torch.finfo(tensor.dtype) for tensor in tensors]
    return np.array([one.eps for one in limits]), np.array([one.smallest_normal for one in limits])


def _common_case(seen: Sequence[Seen]) -> list[Factors | None]:
    """Return the factor of each gradient that was multiplied by one factor; None for all others."""
    afters = [history.accumulations[0].after for history, _ in seen]
    finals = [final for _, final in seen if final is not None]
    counts = [sample.elements.shape[0] for sample in finals]
    begins = np.cumsum([0, *counts[:-1]])
    before, now = (torch.cat([sample.elements for sample in several]).double().numpy() for several in (afters, finals))
    norms = np.array([math.nan if sample.norm is None else float(sample.norm) for sample in finals])
    if np.array_equal(before, now) and not (np.isinf(norms).any() or np.isinf(now).any()):
        zero = ~np.logical_or.reduceat(now != 0, begins)
        shown = ~(zero & (norms > 0))
        return [
            Factors({history.accumulations[0].micro: 1.0}) if sees else None
            for (history, _), sees in zip(seen, shown, strict=True)
        ]
    factors, fine = _factors_of(seen, before, now, norms)
    return [
        Factors({history.accumulations[0].micro: float(factor)}) if is_fine else None
        for (history, _), factor, is_fine in zip(seen, factors, fine, strict=True)
    ]


def follow_joined(
    seen: Sequence[Seen], before: Float64Array, now: Float64Array, norms: Float64Array
) -> list[Factors] | None:
    """Follow gradients that `are_usual`; None where any of them was changed by more than one factor.

    Args:
        seen: their histories, and their samples at the step.
        before: the elements of all samples after their backward, one after the other.
        now: the same at the step.
        norms: of the gradients at the step.
    """
    factors, fine = _factors_of(seen, before, now, norms)
    if not fine.all():
        return None
    found = zip(seen, factors.tolist(), strict=True)
    return [Factors({history.accumulations[0].micro: factor}) for (history, _), factor in found]


def _factors_of(
    seen: Sequence[Seen], before: Float64Array, now: Float64Array, norms: Float64Array
) -> tuple[Float64Array, npt.NDArray[np.bool_]]:
    """Return the factor of each gradient that was accumulated once, and whether it explains what happened to it."""
    finals = [final for _, final in seen if final is not None]
    eps, tiny = _limits([sample.elements for sample in finals])
    widths = np.array(
        [history.width if sample.projected else 0 for (history, _), sample in zip(seen, finals, strict=True)]
    )
    return _one_factor_each(before, now, [sample.elements.shape[0] for sample in finals], norms, eps, tiny, widths)


def _one_factor_each(
    before: Float64Array,
    now: Float64Array,
    counts: Sequence[int],
    norms: Float64Array,
    eps: Float64Array,
    tiny: Float64Array,
    widths: Float64Array,
) -> tuple[Float64Array, npt.NDArray[np.bool_]]:
    """Return the factor of each of several samples, and whether it explains what happened to the sample.

    Args:
        before: the samples after their backward, one after the other.
        now: the same at the step.
        counts: how many elements each has.
        norms: of the gradients; NaN where it was not taken.
        eps: the relative rounding of each gradient's dtype.
        tiny: its smallest normal number.
        widths: the widths of gradients that are seen through random columns, 0 for the others.
    """
    begins = np.cumsum([0, *counts[:-1]])
    with np.errstate(all="ignore"):  # what is not finite is within no bound
        same = np.logical_and.reduceat(before == now, begins)
        power = np.add.reduceat(before * before, begins)
        factors = np.where(same, 1.0, np.add.reduceat(before * now, begins) / power)
        left = np.sqrt(np.add.reduceat((now - np.repeat(factors, counts) * before) ** 2, begins))
        size = np.sqrt(np.add.reduceat(now * now, begins))
        units = SAMPLE_ROUNDING + 2 * np.sqrt(widths)
        within = left <= units * eps * np.where(widths > 0, np.fmax(size, norms), size) + tiny / eps
        blind = (size == 0) & (norms > 0)
        fine = (same | within) & np.isfinite(size) & (factors != 0.0) & ~blind
    return factors, fine


def follow(history: GradientHistory, final: GradientSample | None) -> Factors:
    """Follow a parameter's gradient from its accumulations to the step.

    Args:
        history: the accumulations since the last step, in order.
        final: the sample of the gradient as the step sees it; None when there is no gradient.
    """
    following = _Following(history.width)
    last: GradientSample | None = None
    for event in history.accumulations:
        following.advance(last, event.before)
        following.factors[event.micro] = 1.0
        last = event.after
    following.advance(last, final)
    return Factors(following.factors, following.objection, following.blind)


@dataclass(slots=True)
class _Following:
    width: int
    factors: dict[int, float] = field(default_factory=dict)
    objection: str | None = None
    blind: bool = False

    def advance(self, last: GradientSample | None, now: GradientSample | None) -> None:
        """Apply to all factors so far what happened to the gradient since it was last seen."""
        if now is None or now.zero:
            if now is None or last is None or not last.zero:  # cleared; a gradient that was zero already stays as it is
                self.factors = dict.fromkeys(self.factors, 0.0)
                self.objection, self.blind = None, False
            return
        if last is None:
            self.objection, self.blind = NOT_CLEARED, False
            return
        before, after = last.array, now.array
        if not np.isfinite(after).all():
            self._object(NOT_FINITE)
            return
        if last.blind or now.blind:
            self._object(BLIND, blind=True)
            return
        if before.shape == after.shape and np.array_equal(before, after):
            return
        factor, difference = _one_factor(before, after)
        size = now.size
        if not difference <= self._rounding(now, size):
            size = now.true_size
        if not difference <= self._rounding(now, size):
            self._object(
                f"its gradient was changed between backward and step by something other than one factor (residual "
                f"{difference / size if size else math.nan:.1e}): clipping by value, noise, or an edit by hand"
            )
            factor = math.nan
        self.factors = {micro: factor * one for micro, one in self.factors.items()}

    def _object(self, text: str, *, blind: bool = False) -> None:
        if self.objection is None:
            self.objection, self.blind = text, blind

    def _rounding(self, sample: GradientSample, size: float) -> float:
        limits = torch.finfo(sample.elements.dtype)
        units = SAMPLE_ROUNDING + (2 * math.sqrt(self.width) if sample.projected else 0)
        return units * limits.eps * size + limits.smallest_normal / limits.eps


def _one_factor(before: Float64Array, after: Float64Array) -> tuple[float, float]:
    """Return the factor f that explains `after = f · before` best, and what it leaves, ‖after − f · before‖."""
    power = float(before @ before) if before.shape == after.shape else math.nan
    if not math.isfinite(power):
        return math.nan, math.inf
    factor = float(before @ after) / power if power else 1.0
    return factor, length(after - factor * before)
