"""Samples of gradients: a few fixed elements of each, by which a gradient is followed from its backward to its step.

A sample shows whether a gradient was multiplied by one factor, cleared, or changed in another way, for the cost of
reading some hundred elements. It does not show whether the recorded patterns explain the gradient, nor an edit of
elements outside of it: that is `gradient_check`'s business.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualform.recording.probes import Float64Array, as_float64, is_at_hand, length, norm_of

Look = Literal["now", "later", "at the step"]
SAMPLE_ELEMENTS = 256
"""Least number of elements in a sample; a gradient of fewer than twice as many is sampled whole."""
MAX_PLANNED_ELEMENTS = 1 << 15
"""Elements up to which torch copies on one thread in any case (`at::internal::GRAIN_SIZE`)."""
FEW_NONZERO = 16
"""A sample with fewer non-zero elements says too little; the gradient is seen through random columns instead."""


@dataclass(slots=True, eq=False)
class GradientSample:
    """A few numbers of a gradient G at one moment.

    Attributes:
        elements: a fixed sample of G's elements, (n,); or G R with fixed random columns R, where `projected`.
        projected: whether `elements` are G R.
        norm: the norm of G, (), where it was taken: where the elements may be zero although G is not, and where the
            rounding of G R will be compared with it.
        gradient: G itself, where it stays as it is until the sample has been looked at.
    """

    elements: Tensor
    projected: bool = False
    norm: Tensor | None = None
    gradient: Tensor | None = None
    _array: Float64Array | None = None

    @property
    def array(self) -> Float64Array:
        """The elements in float64."""
        if self._array is None:
            self._array = as_float64(self.elements)
        return self._array

    @property
    def zero(self) -> bool:
        """Whether the whole gradient was zero."""
        return not self.array.any() if self.norm is None else float(self.norm) == 0.0

    @property
    def size(self) -> float:
        """What the rounding of the elements is relative to: their norm, or where they are G R about that of G."""
        return max(length(self.array), 0.0 if self.norm is None or not self.projected else float(self.norm))

    @property
    def true_size(self) -> float:
        """As `size`, with the norm of G itself where G is still there: G R of one of low rank may happen to cancel."""
        return self.size if self.gradient is None else max(self.size, float(norm_of(self.gradient)))

    @property
    def blind(self) -> bool:
        """Whether the sample is zero although the gradient is not, so that it cannot show a factor."""
        return self.norm is not None and not self.array.any() and not self.zero


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """Where the elements of a gradient's sample lie in its memory; for contiguous gradients in the CPU's memory.

    Attributes:
        shape: the gradient's.
        dtype: the gradient's.
        count: how many elements there are, as a shape.
        stride: how far they are apart, as a stride.
        least: a sample with fewer non-zero elements is not taken by the plan.
    """

    shape: torch.Size
    dtype: torch.dtype
    count: tuple[int]
    stride: tuple[int]
    least: int

    def view(self, gradient: Tensor) -> Tensor | None:
        """Return the sample's elements as a view of a gradient's memory; None where the plan is not for it."""
        if gradient.shape != self.shape or gradient.dtype is not self.dtype or not gradient.is_cpu:
            return None
        if gradient.layout is not torch.strided or not gradient.is_contiguous():
            return None
        return (gradient.detach() if gradient.requires_grad else gradient).as_strided(self.count, self.stride)


def plan_sample(parameter: Tensor) -> SamplePlan | None:
    """Return where the sample of a parameter's gradient lies, as `take_sample` takes it; None where it has to be asked.

    That is on a GPU, in a dtype that numpy does not know, and for a gradient with one axis so long that torch copies it
    by several threads.
    """
    size = parameter.numel()
    if not is_at_hand(parameter) or parameter.dtype not in (torch.float32, torch.float64) or not size:
        return None
    if parameter.dim() == 1:
        plain = SamplePlan(parameter.shape, parameter.dtype, (size,), (1,), 0)
        return plain if size <= MAX_PLANNED_ELEMENTS else None
    step = max(1, size // SAMPLE_ELEMENTS)
    return SamplePlan(parameter.shape, parameter.dtype, (-(-size // step),), (step,), FEW_NONZERO if step > 1 else 1)


def take_sample(
    gradient: Tensor, columns: Tensor | None, *, projected: bool | None = None, look: Look = "later"
) -> GradientSample:
    """Take a sample of a gradient; of one with a single axis all of it.

    Args:
        gradient: of a parameter, in its shape.
        columns: the fixed random columns R of the parameter (d_in, C), or None where it has a single axis.
        projected: whether to see the gradient through R, as an earlier sample of it does that this one is compared
            with; None where there is none: then only where a sample has few non-zero elements. On a GPU it always is.
        look: when the gradient is looked at again. "at the step": it stays as it is until then. "now": it is about to
            change, so its norm is taken. "later": the sample is what a later one is compared with, and needs no norm.
    """
    gradient = gradient.detach()
    if not is_at_hand(gradient):
        return _take_elsewhere(gradient, columns, look)
    if columns is None:
        elements, projected = gradient.flatten().clone(), False
    elif projected:
        elements = (gradient.flatten(1) @ columns).flatten()
    else:
        flat = gradient.view(-1) if gradient.is_contiguous() else gradient.flatten()
        elements = flat[:: max(1, len(flat) // SAMPLE_ELEMENTS)].clone()
        few = len(elements) < len(flat) and np.count_nonzero(_as_array(elements)) < FEW_NONZERO
        if few and projected is None:
            return take_sample(gradient, columns, projected=True, look=look)
    if columns is None:
        needed = False
    elif projected:
        needed = look == "now"
    else:  # elements of zero may be those of a gradient that is not
        needed = not bool(elements.any())
    norm = norm_of(gradient) if needed else None
    return GradientSample(elements, bool(projected), norm, gradient if look == "at the step" else None)


def sample_elements(gradient: Tensor, *, look: Look) -> GradientSample:
    """Take a sample of some elements of a gradient, without a look at any of them; `look` as `take_sample` has it."""
    gradient = gradient.detach() if gradient.requires_grad else gradient
    size = gradient.numel()
    step = 1 if gradient.dim() == 1 else max(1, size // SAMPLE_ELEMENTS)
    flat = gradient if gradient.is_contiguous() else gradient.contiguous()
    elements = flat.as_strided((-(-size // step),), (step,))
    if look == "at the step":
        return GradientSample(elements, False, None, gradient)
    return GradientSample(elements.clone(), False, norm_of(gradient) if look == "now" else None)


def _take_elsewhere(gradient: Tensor, columns: Tensor | None, look: Look) -> GradientSample:
    """Take a sample of a gradient on a GPU: always G R, whatever was asked for, or all of a gradient with one axis.

    G R is as cheap there as some elements, and nobody has to look whether it shows anything, which would be waited for.
    """
    kept = gradient if look == "at the step" else None
    if columns is None:
        # At the step all samples are packed into one tensor before anything can change the gradient.
        elements = gradient.reshape(-1) if kept is not None else gradient.clone().view(-1)
        return GradientSample(elements, False, None, kept)
    whole = gradient if gradient.dim() == 2 else gradient.flatten(1)
    norm = norm_of(gradient) if look == "now" else None
    return GradientSample(torch.mm(whole, columns).view(-1), True, norm, kept)


def _as_array(elements: Tensor) -> npt.NDArray[Any]:
    return elements.float().numpy() if elements.dtype is torch.bfloat16 else elements.numpy()
