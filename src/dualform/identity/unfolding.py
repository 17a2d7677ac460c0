"""How the keys of a convolution follow from its inputs: every key is the patch of an input that the kernel covers.

An input is padded already, (B, channels, *sizes); its patches are (B, *locations, channels × kernel), one for each
output location, in the order of locations. Patches that overlap repeat elements of the input, under a kernel of 3 × 3
nine times. Taking them is copying: nothing is computed, so patches are made again from the input to the bit.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

Ints = npt.NDArray[np.int64]

MAX_PLACES = 1 << 20
"""Elements of all patches of one input up to which their places in the input are kept, 8 bytes each."""
MAX_REPETITION = 512
"""How many times the elements of an input its patches may have, where the input is kept in their place.

Larger kernels are rare (7 × 7 × 7 takes 343), and the patches of inputs in a stranger's file take no more memory than
so many times the file.
"""


@dataclass(frozen=True, slots=True)
class Unfolding:
    """How patches are taken from an input, axis by axis; there are one to three axes.

    >>> Unfolding((2,), (1,), (1,)).patches(torch.tensor([[[1.0, 2.0, 3.0]]]))
    tensor([[[1., 2.],
             [2., 3.]]])

    Attributes:
        kernel: the number of elements that the kernel covers.
        stride: how far apart the patches of neighbouring output locations begin.
        dilation: how far apart the elements under the kernel are.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def repeats(self) -> bool:
        """Whether the patches of a large input have more elements than the input."""
        return math.prod(self.kernel) > math.prod(self.stride)

    @property
    def extents(self) -> tuple[int, ...]:
        """How many elements of the input lie between the first and the last one under the kernel, both counted."""
        return tuple(spread * (size - 1) + 1 for size, spread in zip(self.kernel, self.dilation, strict=True))

    def locations(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return how many output locations there are along each axis of a padded input."""
        every = zip(sizes, self.extents, self.stride, strict=True)
        return tuple((size - extent) // step + 1 for size, extent, step in every)

    def is_smaller(self, sizes: Sequence[int]) -> bool:
        """Say whether an input of these sizes has fewer elements than its patches, and not too few to be believed."""
        if any(size < extent for size, extent in zip(sizes, self.extents, strict=True)):
            return False
        elements, repeated = math.prod(sizes), math.prod(self.locations(sizes)) * math.prod(self.kernel)
        return elements < repeated <= MAX_REPETITION * elements

    def patches(self, inputs: Tensor) -> Tensor:
        """Return the patches of inputs, (B, *locations, channels × kernel): the plain way, on any device."""
        axes, patches = len(self.kernel), inputs
        for axis, (extent, step, spread) in enumerate(zip(self.extents, self.stride, self.dilation, strict=True)):
            patches = patches.unfold(axis + 2, extent, step)[..., ::spread]
        # (B, channels, *locations, *kernel) -> (B, *locations, channels, *kernel)
        return patches.movedim(1, axes + 1).flatten(axes + 1)

    def rows(self, inputs: Tensor) -> Tensor:
        """Return the patches of inputs, (T, channels × kernel), in new memory."""
        width = inputs.shape[1] * math.prod(self.kernel)
        if inputs.device.type != "cpu":
            return self.patches(inputs).reshape(-1, width)
        rows = inputs.new_empty(len(inputs) * math.prod(self.locations(inputs.shape[2:])), width)
        self.fill(rows, inputs)
        return rows

    def project(self, inputs: Tensor, columns: Tensor) -> Tensor:
        """Return the product of the patches of inputs with some columns, (T, C), as a convolution: without the patches.

        Args:
            inputs: (B, channels, *sizes)
            columns: (channels × kernel, C)
        """
        kernels = columns.T.reshape(-1, inputs.shape[1], *self.kernel)
        convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[len(self.kernel) - 1]
        found = convolve(inputs, kernels, stride=self.stride, dilation=self.dilation)  # (B, C, *locations)
        return found.movedim(1, -1).reshape(-1, columns.shape[1])

    def fill(self, patches: Tensor, inputs: Tensor) -> None:
        """Put what `patches` returns into a contiguous tensor, in the CPU's memory several times as fast."""
        channels, sizes = inputs.shape[1], tuple(inputs.shape[2:])
        if (places := self.places(channels, sizes)) is not None:
            torch.index_select(inputs.flatten(1), 1, places.view(-1), out=patches.view(len(inputs), places.numel()))
        else:
            self.fill_by_offset(patches, inputs)

    def places(self, channels: int, sizes: tuple[int, ...]) -> Tensor | None:
        """Return where in an input the elements of all its patches are, (locations, width); None where it is large."""
        width = channels * math.prod(self.kernel)
        return None if self.is_large(channels, sizes) else _places(self, channels, sizes).view(-1, width)

    def is_large(self, channels: int, sizes: tuple[int, ...]) -> bool:
        """Say whether an input has so many patches that the places of their elements are not kept."""
        return math.prod(self.locations(sizes)) * channels * math.prod(self.kernel) > MAX_PLACES

    def begins(self, locations: Ints, sizes: tuple[int, ...]) -> Ints:
        """Return where in a channel of an input the patches of some output locations begin, (n,).

        >>> Unfolding((2, 2), (1, 2), (1, 1)).begins(np.array([0, 1, 2]), (3, 5))
        array([0, 2, 5])
        """
        at = np.unravel_index(locations, self.locations(sizes))
        every = zip(at, self.stride, _row_lengths(sizes), strict=True)
        return sum((place * (step * length) for place, step, length in every), np.zeros_like(locations))

    def offsets(self, channels: int, sizes: tuple[int, ...]) -> Ints:
        """Return how far from where a patch begins its elements lie in an input, (width,).

        >>> Unfolding((2, 2), (1, 2), (1, 1)).offsets(2, (3, 5))
        array([ 0,  1,  5,  6, 15, 16, 20, 21])
        """
        found = np.arange(channels) * math.prod(sizes)
        for count, spread, length in zip(self.kernel, self.dilation, _row_lengths(sizes), strict=True):
            found = np.add.outer(found, np.arange(count) * (spread * length)).reshape(-1)
        return found

    def used(self, inputs: Tensor) -> Tensor:
        """Return the part of inputs that lies in any patch: a stride may leave the end of an axis out, or gaps."""
        for axis, size in enumerate(inputs.shape[2:]):
            mine = _used(size, self.kernel[axis], self.stride[axis], self.dilation[axis])
            if mine is not None:
                inputs = inputs.index_select(axis + 2, mine.to(inputs.device))
        return inputs

    def fill_by_offset(self, patches: Tensor, inputs: Tensor) -> None:
        """Do what `fill` does without keeping places: for each offset under the kernel, all locations at once.

        A copy patch by patch has runs of memory that are only as long as a row of the kernel.
        """
        axes, locations = len(self.kernel), self.locations(inputs.shape[2:])
        patches = patches.view(len(inputs), *locations, inputs.shape[1], *self.kernel)
        for offset in itertools.product(*(range(size) for size in self.kernel)):
            begins = [at * spread for at, spread in zip(offset, self.dilation, strict=True)]
            slices = [
                slice(begin, begin + step * (count - 1) + 1, step)
                for begin, step, count in zip(begins, self.stride, locations, strict=True)
            ]
            there: tuple[Any, ...] = (..., *offset)
            patches[there] = inputs[(slice(None), slice(None), *slices)].movedim(1, axes + 1)


def _row_lengths(sizes: Sequence[int]) -> list[int]:
    """Return how far apart in memory neighbours along each axis are."""
    return [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]


@functools.lru_cache(maxsize=64)
def _places(unfolding: Unfolding, channels: int, sizes: tuple[int, ...]) -> Tensor:
    """Return where in an input the elements of all its patches are, one patch after the other."""
    image = torch.arange(channels * math.prod(sizes)).view(1, channels, *sizes)
    return unfolding.patches(image).reshape(-1)


@functools.lru_cache(maxsize=256)
def _used(size: int, kernel: int, stride: int, dilation: int) -> Tensor | None:
    """Return which elements of an axis lie in any patch; None where all do."""
    reached = stride * ((size - dilation * (kernel - 1) - 1) // stride)  # where the last patch begins
    seen = torch.zeros(size, dtype=torch.bool)
    for at in range(kernel):
        seen[at * dilation : at * dilation + reached + 1 : stride] = True
    return None if bool(seen.all()) else seen.nonzero()[:, 0]


Box = tuple[tuple[int, int], ...]
"""For each axis of a grid the first of some consecutive places, and the one behind the last."""


def boxes(grid: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Cut consecutive places of a grid, counted row by row, into boxes whose places are consecutive too, in order.

    >>> list(boxes((3, 4), 2, 9))
    [((0, 1), (2, 4)), ((1, 2), (0, 4)), ((2, 3), (0, 1))]
    """
    if start >= stop:
        return
    if len(grid) == 1:
        yield ((start, stop),)
        return
    inner = math.prod(grid[1:])
    (first, begin), (last, end) = divmod(start, inner), divmod(stop, inner)
    if first == last:
        yield from (((first, first + 1), *box) for box in boxes(grid[1:], begin, end))
        return
    if begin:
        yield from (((first, first + 1), *box) for box in boxes(grid[1:], begin, inner))
        first += 1
    if first < last:
        yield ((first, last), *((0, size) for size in grid[1:]))
    if end:
        yield from (((last, last + 1), *box) for box in boxes(grid[1:], 0, end))
