"""Probes: a few elements that stand for a gradient, and what recorded patterns predict for them.

The gradient G of a weight is measured as P = G R with a few fixed random columns R (a bias's gradient is taken whole);
patterns add Eᵀ(X R) to it. The two are compared in `dualform.recording.gradient_check`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualform.identity.parameter_maps import ParameterMap
from dualform.identity.parameter_use import ParameterUse
from dualform.identity.unfolding import Unfolding

Float64Array = npt.NDArray[np.float64]

COLUMNS = 2  # random columns of a probe
COLUMNS_OF_FEW_ROWS = 4  # of a gradient with few rows, whose projection may happen to cancel
FEW_ROWS = 64
COARSE_ROUNDING = 2.0**-11
"""Relative rounding that autocast gives a gradient, of which bfloat16 may take 16 times as much."""


def projection(rows: int, width: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the fixed random columns R for a gradient (rows, width), (width, COLUMNS).

    No element is near zero, so that every single element of the gradient is seen; and ‖G R‖ is about ‖G‖.
    """
    count = COLUMNS_OF_FEW_ROWS if rows < FEW_ROWS else COLUMNS
    generator = torch.Generator().manual_seed(20220627)
    drawn = torch.rand(count, width, generator=generator, dtype=torch.float64) * 2 - 1
    found = drawn.sign() * (0.5 + drawn.abs()) / math.sqrt((1 + 1 / 12) * count)
    return found.to(device=device, dtype=dtype).T  # products with this layout are 5 times faster, and rounded less


def is_at_hand(tensor: Tensor) -> bool:
    """Say whether looking at a tensor's numbers makes nobody wait: whether they are in the CPU's memory."""
    return tensor.device.type == "cpu"


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
class Patches:
    """Keys that are the patches of an input in the CPU's memory, and that are made only where they are needed."""

    inputs: Tensor  # (B, channels, *sizes)
    unfolding: Unfolding

    def rows(self) -> Tensor:
        """Return the keys, (T, d_in)."""
        return self.unfolding.rows(self.inputs)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a call's patterns add to a parameter's probe, and what the size is found from that its rounding is of.

    Attributes:
        columns: what the patterns add.
        values: (T, d_out)
        keys: (T, d_in), or what they are patches of; None where the parameter's key is 1.
        rounding: how many times more rounding the values carry than autograd's own.
    """

    columns: Tensor
    values: Tensor
    keys: Tensor | Patches | None
    rounding: float

    def size(self) -> float:
        """Return ‖E‖ ‖X‖, or ‖E‖ sqrt(T) without keys, times the rounding's factor."""
        keys = self.keys.rows() if isinstance(self.keys, Patches) else self.keys
        norm = None if keys is None else float(norm_of(keys))
        return self.size_of(float(norm_of(self.values)), norm)

    def size_of(self, norm_of_values: float, norm_of_keys: float | None) -> float:
        """Return the size from the norms of values and keys."""
        return self.rounding * norm_of_values * (math.sqrt(len(self.values)) if norm_of_keys is None else norm_of_keys)


def predict(
    specs: Mapping[ParameterUse, ProbeSpec], values: Tensor, keys: Tensor | Patches, *, rounding: float
) -> dict[ParameterUse, Prediction]:
    """Return what the patterns of one call predict for the probe of each of the layer's parameters, by use.

    All parameters share one product with the values, Eᵀ F with each one's factor F. Their rounding is relative to
    sum |e| ‖x‖, which is at most ‖E‖ ‖X‖ (or sum |e|, at most ‖E‖ sqrt(T), where the key is 1).

    Args:
        specs: how the gradient of each parameter is measured, by use.
        values: (T, d_out)
        keys: (T, d_in), or what they are patches of, in the dtype of the values.
        rounding: how many times more rounding the values carry than autograd's own.
    """
    maps = [use.parameter_map for use in specs]
    if isinstance(keys, Patches) and not all(each.is_plain_matrix or each.is_plain_bias for each in maps):
        keys = keys.rows()
    if isinstance(keys, Tensor) and keys.is_floating_point():
        keys = keys.to(values.dtype)
    factors = [_factors(each, values, keys, spec.columns) for each, spec in zip(maps, specs.values(), strict=True)]
    joined = [found for found in factors if found is not None]
    together = torch.cat(joined, dim=1).T @ values if joined else values[:0]  # several times faster than Eᵀ F
    products = iter(together.T.split([f.shape[1] for f in joined], dim=1) if joined else ())
    found = {}
    for (use, spec), parameter_map, factor in zip(specs.items(), maps, factors, strict=True):
        if factor is not None:
            columns = parameter_map.place_projection(next(products), spec.shape[0])
            columns = columns[:, 0] if spec.columns is None else columns
        else:
            rows = keys.rows() if isinstance(keys, Patches) else keys
            gradient = parameter_map.gradient(values, rows, spec.shape)
            columns = gradient if spec.columns is None else gradient.flatten(1) @ spec.columns
        found[use] = Prediction(columns, values, keys if parameter_map.multiplies_keys else None, rounding)
    return found


def _factors(
    parameter_map: ParameterMap, values: Tensor, keys: Tensor | Patches, columns: Tensor | None
) -> Tensor | None:
    """Return the factor F of a parameter, as `ParameterMap.projection_factors` does."""
    if isinstance(keys, Tensor):
        return parameter_map.projection_factors(keys, columns)
    if parameter_map.is_plain_matrix and columns is not None:
        return keys.unfolding.project(keys.inputs, columns)
    # That of a bias does not depend on the keys but for their number.
    return parameter_map.projection_factors(values if parameter_map.is_plain_bias else keys.rows(), columns)


def norms_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the norm of each tensor, () float64 or as `norm_of` has it, by a few kernels for all of them on a GPU."""
    if not tensors or any(is_at_hand(tensor) or not tensor.is_floating_point() for tensor in tensors):
        return [norm_of(tensor) for tensor in tensors]
    return list(torch._foreach_norm(list(tensors), 2, dtype=torch.float64))


def norm_of(tensor: Tensor) -> Tensor:
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
