"""Probes: a few elements that stand for a gradient, and what recorded patterns predict for them.

The gradient G of a weight is measured as P = G R with a few fixed random columns R (a bias's gradient is taken whole);
patterns add Eᵀ(X R) to it. What the probes of a step say together is found in `dualform.recording.gradient_history`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dualform.identity.parameter_use import ParameterUse
from dualform.threads import one_thread

if TYPE_CHECKING:
    from dualform.recording.hooks import Arrival

Float64Array = npt.NDArray[np.float64]
Size = Literal["about", "now", "later"]

COLUMNS = 2  # random columns of a probe
COLUMNS_OF_FEW_ROWS = 4  # of a gradient with few rows, whose projection may happen to cancel
FEW_ROWS = 64
MIN_NORM_ELEMENTS = 256  # elements that a probe needs for its norm to tell the gradient's
COARSE_ROUNDING = 2.0**-11
"""Relative rounding that autocast gives a gradient, of which bfloat16 may take 16 times as much."""


@dataclass(slots=True, eq=False)
class Probe:
    """A measurement of a gradient: a few elements, and its norm where that was taken."""

    columns: Tensor  # G R, (d_out, COLUMNS), or a bias's gradient itself, (d_out,)
    norm: Tensor | None = None  # (): the gradient's, where it was taken
    gradient: Tensor | None = None  # itself, where it stays as it is until the probe is resolved
    _elements: Float64Array | None = None
    _size: float | None = None

    @property
    def elements(self) -> Float64Array:
        """All elements of the columns, in float64."""
        if self._elements is None:
            self._elements = as_float64(self.columns)
        return self._elements

    @property
    def size(self) -> float:
        """The norm of the gradient, or about that: what the rounding of the columns is relative to."""
        if self._size is None:
            self._size = length(self.elements) if self.norm is None else float(self.norm)
        return self._size

    @property
    def true_size(self) -> float:
        """The norm of the gradient itself, where the gradient is at hand.

        The columns of a gradient of low rank may happen to cancel, and their norm says nothing then.
        """
        return self.size if self.gradient is None else max(self.size, float(_norm(self.gradient)))

    @property
    def zero(self) -> bool:
        """Whether the gradient was zero."""
        return not self.elements.any()


def projection(rows: int, width: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the fixed random columns R for a gradient (rows, width), (width, COLUMNS).

    No element is near zero, so that every single element of the gradient is seen; and ‖G R‖ is about ‖G‖.
    """
    count = COLUMNS_OF_FEW_ROWS if rows < FEW_ROWS else COLUMNS
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
    exact = taken.numel() < MIN_NORM_ELEMENTS or size == "now"
    return Probe(taken, _norm(gradient) if exact else None, gradient if size == "later" else None)


def as_float64(columns: Tensor) -> Float64Array:
    """Return all elements of a small tensor as a numpy array, whose squares neither underflow nor overflow."""
    flat = columns.reshape(-1)
    here = flat if flat.device.type == "cpu" else flat.cpu()
    found: Float64Array = here.double().numpy()
    return found


def length(elements: Float64Array) -> float:
    """Return the Euclidean norm of an array of one axis."""
    return math.sqrt(float(elements @ elements))


@dataclass(frozen=True, slots=True)
class ProbeSpec:
    """How a parameter's gradient is measured: by random columns (d_in, COLUMNS), or whole where it has one axis."""

    columns: Tensor | None
    shape: Sequence[int]


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a call's patterns add to a parameter's probe, and what finds the size that its rounding is relative to."""

    columns: Tensor
    size: Callable[[], float]


def predict(
    specs: Mapping[ParameterUse, ProbeSpec], values: Tensor, keys: Tensor, *, rounding: float
) -> dict[ParameterUse, Prediction]:
    """Return what the patterns of one call predict for the probe of each of the layer's parameters, by use.

    All parameters share one product with the values, Eᵀ F with each one's factor F. Their rounding is relative to
    sum |e| ‖x‖, which is at most ‖E‖ ‖X‖ (or sum |e|, at most ‖E‖ sqrt(T), where the key is 1).

    Args:
        specs: how the gradient of each parameter is measured, by use.
        values: (T, d_out)
        keys: (T, d_in)
        rounding: how many times more rounding the values carry than autograd's own.
    """
    keys = keys.to(values.dtype) if keys.is_floating_point() else keys
    maps = [use.parameter_map for use in specs]
    factors = [each.projection_factors(keys, spec.columns) for each, spec in zip(maps, specs.values(), strict=True)]
    joined = [found for found in factors if found is not None]
    together = torch.cat(joined, dim=1).T @ values if joined else values[:0]  # several times faster than Eᵀ F
    products = iter(together.T.split([f.shape[1] for f in joined], dim=1) if joined else ())
    found = {}
    for (use, spec), parameter_map, factor in zip(specs.items(), maps, factors, strict=True):
        if factor is not None:
            columns = parameter_map.place_projection(next(products), spec.shape[0])
            columns = columns[:, 0] if spec.columns is None else columns
        else:
            gradient = parameter_map.gradient(values, keys, spec.shape)
            columns = gradient if spec.columns is None else gradient.flatten(1) @ spec.columns
        found[use] = Prediction(columns, _size(values, keys if parameter_map.multiplies_keys else None, rounding))
    return found


class GradientProbes:
    """Takes probes of a model's gradients, through random columns that stay the same for each parameter."""

    def __init__(self) -> None:
        self._columns: dict[str, Tensor] = {}

    def probe(self, name: str, parameter: nn.Parameter, *, size: Size = "about") -> Probe | None:
        """Take a probe of a parameter's gradient, if there is one."""
        if parameter.grad is None:
            return None
        gradient = parameter.grad if parameter.dim() == 1 else parameter.grad.flatten(1)
        with one_thread(bytes_read=gradient.nbytes, device=gradient.device):
            return probe(gradient, self._projection(name, parameter), size=size)

    def predictions(self, arrival: "Arrival") -> dict[ParameterUse, Prediction]:
        """Return what a call's patterns predict for its parameters, computed once for all of them."""
        if arrival.predictions is None:
            arrival.predictions = {}
            if arrival.values is not None and arrival.keys is not None:
                layer = arrival.call.layer
                specs = {
                    use: ProbeSpec(self._projection(name, parameter), parameter.shape)
                    for use, (name, parameter) in layer.parameters.items()
                }
                dtype = next(iter(layer.parameters.values()))[1].dtype
                values = arrival.values.to(dtype)
                # Autograd rounds the whole gradient to what autocast computed in.
                coarse = 1.0 if arrival.call.coarse is None else COARSE_ROUNDING / torch.finfo(dtype).eps
                rounding = layer.kind.rounding * coarse
                with one_thread(bytes_read=values.nbytes + arrival.keys.nbytes, device=values.device):
                    arrival.predictions = predict(specs, values, arrival.keys, rounding=rounding)
        return arrival.predictions

    def _projection(self, name: str, parameter: nn.Parameter) -> Tensor | None:
        if parameter.dim() == 1:
            return None
        columns = self._columns.get(name)
        if columns is None or columns.device != parameter.device:
            rows, width = len(parameter), parameter[0].numel()
            columns = projection(rows, width, dtype=parameter.dtype, device=parameter.device)
            self._columns[name] = columns
        return columns


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
