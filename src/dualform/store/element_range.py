"""The least and the greatest element of tensors: what the manifest says of the keys of a shard."""

import numpy as np
import torch
from torch import Tensor

Ends = tuple[float, float]
"""The least element and the greatest."""
SMALL_BYTES = 1 << 16
"""Bytes up to which to call numpy twice takes longer than torch does."""
_IN_NUMPY = (
    torch.float32,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
)
"""Types of whose elements numpy finds the least and the greatest in less time than torch does."""


def element_range(elements: Tensor) -> Ends | None:
    """Return the least and the greatest element of a tensor in the CPU's memory; nothing where it has no elements.

    >>> element_range(torch.tensor([[3.0, -1.0], [2.0, 0.5]]))
    (-1.0, 3.0)
    """
    if not elements.numel():
        return None
    if elements.nbytes > SMALL_BYTES and elements.dtype in _IN_NUMPY:
        array = elements.numpy()
        return float(array.min()), float(array.max())
    low, high = torch.aminmax(elements)
    return float(low), float(high)


class RangeOfParts:
    """Finds the least and the greatest element of a tensor that is looked at part by part."""

    def __init__(self) -> None:
        self._found: list[Ends] = []

    def look(self, part: Tensor) -> None:
        """Take a part's elements."""
        found = element_range(part)
        if found is not None:
            self._found.append(found)

    def ends(self) -> Ends | None:
        """Return what `element_range` returns of the whole: where an element is not a number, neither end is."""
        if not self._found:
            return None
        lows, highs = zip(*self._found, strict=True)
        return float(np.min(lows)), float(np.max(highs))


def joined_ranges(one: Ends | None, other: Ends | None) -> Ends | None:
    """Return the least and the greatest element of two sets of elements, from those of each; nothing of no elements."""
    if one is None or other is None:
        return other if one is None else one
    return min(other[0], one[0]), max(other[1], one[1])
