"""Probes: see a gradient through a few numbers, and tell what recorded patterns predict for them.

The gradient G of a weight is watched through P = G R with a few fixed random columns R (a bias through itself); what
patterns add to it is Eᵀ(X R). What the probes of a step say together is found in `dualform.recording.trails`.
Pure; hooks call it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualform.identity.parameter_use import ParameterUse

Numbers = npt.NDArray[np.float64]
Size = Literal["about", "now", "later"]

COLUMNS = 2
COLUMNS_OF_FEW = 4  # of a gradient with few rows, whose projection may happen to cancel
FEW = 64
MANY = 256  # elements of a probe whose norm tells the gradient's
COARSE = 2.0**-11  # of what a gradient's rounding is relative to, autocast to bfloat16 may take 16 times that


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
            self._numbers = numbers_of(self.columns)
        return self._numbers

    @property
    def size(self) -> float:
        """What their rounding is relative to: the norm of the gradient, or about that."""
        if self._size is None:
            self._size = length(self.numbers) if self.norm is None else float(self.norm)
        return self._size

    @property
    def true_size(self) -> float:
        """The norm of the gradient itself, where it can be had: the columns of one of low rank may happen to cancel."""
        return self.size if self.gradient is None else max(self.size, float(_norm(self.gradient)))

    @property
    def zero(self) -> bool:
        """Whether the gradient was zero."""
        return not self.numbers.any()


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


def numbers_of(columns: Tensor) -> Numbers:
    """Return all elements in float64, whose squares neither underflow nor overflow. They are few: numpy is faster."""
    flat = columns.reshape(-1)
    here = flat if flat.device.type == "cpu" else flat.cpu()
    found: Numbers = here.double().numpy()
    return found


def length(numbers: Numbers) -> float:
    """Return the norm of some numbers."""
    return math.sqrt(float(numbers @ numbers))


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


def predict(
    watched: Mapping[ParameterUse, Watching], values: Tensor, keys: Tensor, *, rounding: float
) -> dict[ParameterUse, Prediction]:
    """Return what the patterns of one call predict for the probe of each of the layer's parameters, by use.

    All parameters share one product with the values, Eᵀ F with each one's factor F. Their rounding is relative to
    sum |e| ‖x‖, which is at most ‖E‖ ‖X‖ (or sum |e|, at most ‖E‖ sqrt(T), where the key is 1).

    Args:
        watched: how each parameter is watched, by use.
        values: (T, d_out)
        keys: (T, d_in)
        rounding: how many times more rounding the values carry than autograd's own.
    """
    keys = keys.to(values.dtype) if keys.is_floating_point() else keys
    maps = [use.parameter_map for use in watched]
    factors = [each.projection_factors(keys, how.columns) for each, how in zip(maps, watched.values(), strict=True)]
    joined = [found for found in factors if found is not None]
    together = torch.cat(joined, dim=1).T @ values if joined else values[:0]  # several times faster than Eᵀ F
    products = iter(together.T.split([f.shape[1] for f in joined], dim=1) if joined else ())
    found = {}
    for (use, watching), parameter_map, factor in zip(watched.items(), maps, factors, strict=True):
        if factor is not None:
            columns = parameter_map.place_projection(next(products), watching.shape[0])
            columns = columns[:, 0] if watching.columns is None else columns
        else:
            gradient = parameter_map.gradient(values, keys, watching.shape)
            columns = gradient if watching.columns is None else gradient.flatten(1) @ watching.columns
        found[use] = Prediction(columns, _size(values, keys if parameter_map.multiplies_keys else None, rounding))
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
