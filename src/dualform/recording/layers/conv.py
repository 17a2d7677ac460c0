"""Convolutions: the key is the unfolded patch under the kernel, the value the error at that output location.

A convolution is a linear layer that is applied to every patch of its input: `z[o] = W · patch(o) + b` with the kernel
as a (d_out, channels × kernel) matrix. A pattern's position is its output location.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from dualform.identity.parameter_use import ParameterUse
from dualform.recording.buffer_pool import new_rows
from dualform.recording.layers.layer_kind import LayerKind, present, records

MAX_PLACES = 1 << 20
"""Elements of all patches of one image up to which their places in the image are kept, 8 bytes each."""


class Convolution(LayerKind):
    """z = W · patch + b at every output location; stride, padding of any mode, dilation."""

    key_text = "unfolded patch; position = output location"

    batch_axis = 0
    own_order = True

    def uses(self, module: nn.Module) -> tuple[ParameterUse, ...]:
        """The kernel takes value ⊗ patch, the bias takes the value."""
        kernel = "outer" if cast("_ConvNd", module).groups == 1 else "grouped"
        weight, bias = ParameterUse("weight", "weight", kernel), ParameterUse("bias", "bias", "bias")
        return weight, *present(module, bias)

    def widths(self, module: nn.Module) -> tuple[int, int]:
        """Return (channels × kernel, out_channels)."""
        conv = cast("_ConvNd", module)
        return conv.groups * conv.weight[0].numel(), conv.out_channels

    def keys(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """Return the patches, (B, *output locations, channels × kernel)."""
        conv = cast("_ConvNd", module)
        axes = len(conv.kernel_size)
        if inputs.dim() == axes + 1:  # one image
            inputs = inputs[None]
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        padding = conv._reversed_padding_repeated_twice
        padded = functional.pad(inputs, padding, mode=mode) if any(padding) else inputs
        return patches_on_cpu(conv, padded) if padded.device.type == "cpu" else unfolded_patches(conv, padded)

    def values(self, module: nn.Module, inputs: Tensor, error: Tensor) -> Tensor:
        """Return the errors, (B, *output locations, out_channels)."""
        axes = len(cast("_ConvNd", module).kernel_size)
        return (error[None] if error.dim() == axes + 1 else error).movedim(1, -1)


def unfolded_patches(conv: _ConvNd, padded: Tensor) -> Tensor:
    """Return the patches of a padded input, (B, *output locations, channels × kernel)."""
    return _unfolded(padded, conv.kernel_size, conv.stride, conv.dilation)


def _unfolded(padded: Tensor, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> Tensor:
    axes, patches = len(kernel), padded
    for axis, (size, stride, dilation) in enumerate(zip(kernel, strides, dilations, strict=True)):
        patches = patches.unfold(axis + 2, dilation * (size - 1) + 1, stride)[..., ::dilation]
    # (B, channels, *locations, *kernel) -> (B, *locations, channels, *kernel)
    return patches.movedim(1, axes + 1).flatten(axes + 1)


def patches_on_cpu(conv: _ConvNd, padded: Tensor) -> Tensor:
    """Return what `unfolded_patches` returns, in the CPU's memory several times as fast, and not for autograd."""
    channels, sizes = padded.shape[1], tuple(padded.shape[2:])
    locations = _locations(sizes, conv.kernel_size, conv.stride, conv.dilation)
    width = channels * math.prod(conv.kernel_size)
    patches = new_rows((padded.shape[0], *locations, width), padded)
    if math.prod(locations) * width <= MAX_PLACES:
        places = _places(channels, sizes, conv.kernel_size, conv.stride, conv.dilation)
        torch.index_select(padded.flatten(1), 1, places, out=patches.view(len(patches), len(places)))
    else:
        _copy_by_offset(conv, padded, patches.unflatten(-1, (channels, *conv.kernel_size)), locations)
    return patches


def _locations(
    sizes: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    """Return how many output locations there are along each axis of a padded input."""
    every = zip(sizes, kernel, stride, dilation, strict=True)
    return [(length - spread * (size - 1) - 1) // step + 1 for length, size, step, spread in every]


@functools.lru_cache(maxsize=64)
def _places(
    channels: int, sizes: tuple[int, ...], kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> Tensor:
    """Return where in a padded image the elements of all its patches are, one patch after the other."""
    image = torch.arange(channels * math.prod(sizes)).view(1, channels, *sizes)
    return _unfolded(image, kernel, stride, dilation).reshape(-1)


def _copy_by_offset(conv: _ConvNd, padded: Tensor, patches: Tensor, locations: Sequence[int]) -> None:
    """Copy an input into its patches, (B, *locations, channels, *kernel), all locations at once for each kernel offset.

    A copy patch by patch has runs of memory that are only as long as a row of the kernel.
    """
    axes = len(conv.kernel_size)
    for offset in itertools.product(*(range(size) for size in conv.kernel_size)):
        begins = [at * dilation for at, dilation in zip(offset, conv.dilation, strict=True)]
        places = [
            slice(begin, begin + stride * (count - 1) + 1, stride)
            for begin, stride, count in zip(begins, conv.stride, locations, strict=True)
        ]
        there: tuple[Any, ...] = (..., *offset)
        patches[there] = padded[(slice(None), slice(None), *places)].movedim(1, axes + 1)


@records(nn.Conv1d)
class Conv1d(Convolution):
    """A convolution over one axis."""

    name = "Conv1d"


@records(nn.Conv2d)
class Conv2d(Convolution):
    """A convolution over two axes."""

    name = "Conv2d"


@records(nn.Conv3d)
class Conv3d(Convolution):
    """A convolution over three axes."""

    name = "Conv3d"
