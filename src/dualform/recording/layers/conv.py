"""Convolutions: the key is the unfolded patch under the kernel, the value the error at that output location.

A convolution is a linear layer that is applied to every patch of its input: `z[o] = W · patch(o) + b` with the kernel
as a (d_out, channels × kernel) matrix. A pattern's position is its output location.
"""

import math
from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from dualform.identity.parameter_use import ParameterUse
from dualform.identity.unfolding import Unfolding
from dualform.recording.buffer_pool import new_rows
from dualform.recording.layers.layer_kind import LayerKind, present, records


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
        conv, unfolding = cast("_ConvNd", module), _unfolding_of(module)
        padded = self.repeated_inputs(conv, inputs)
        if padded.device.type != "cpu":
            return unfolding.patches(padded)
        width = padded.shape[1] * math.prod(unfolding.kernel)
        patches = new_rows((len(padded), *unfolding.locations(padded.shape[2:]), width), padded)
        unfolding.fill(patches, padded)
        return patches

    def leading(self, module: nn.Module, inputs: Tensor) -> tuple[int, ...]:
        """Return (B, *output locations)."""
        if type(self).keys is not Convolution.keys:
            return super().leading(module, inputs)
        padded = self.repeated_inputs(module, inputs)
        return len(padded), *_unfolding_of(module).locations(padded.shape[2:])

    def unfolding(self, module: nn.Module) -> Unfolding | None:
        """Return how keys are taken from inputs; None where they take no more memory than the inputs.

        None too for a derived kind whose keys are other ones.
        """
        if type(self).keys is not Convolution.keys:
            return None
        found = _unfolding_of(module)
        return found if found.repeats else None

    def repeated_inputs(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """Return the inputs with their padding, (B, channels, ...), whose patches are the keys."""
        conv = cast("_ConvNd", module)
        if inputs.dim() == len(conv.kernel_size) + 1:  # one image
            inputs = inputs[None]
        padding = conv._reversed_padding_repeated_twice
        if not any(padding):
            return inputs
        if conv.padding_mode != "zeros":
            return functional.pad(inputs, padding, mode=conv.padding_mode)
        if inputs.device.type == "cpu":
            return _with_zeros(inputs, padding)
        return functional.pad(inputs, padding)

    def values(self, module: nn.Module, inputs: Tensor, error: Tensor) -> Tensor:
        """Return the errors, (B, *output locations, out_channels)."""
        axes = len(cast("_ConvNd", module).kernel_size)
        return (error[None] if error.dim() == axes + 1 else error).movedim(1, -1)


def _with_zeros(inputs: Tensor, margins: Sequence[int]) -> Tensor:
    """Return inputs on the CPU with zeros around them, in memory of the recording's pool while training is recorded.

    Args:
        inputs: (B, channels, ...).
        margins: how many zeros each axis gets before and behind it, the last axis first; none is negative.
    """
    before, behind = margins[-2::-2], margins[::-2]
    sizes = [size + sum(around) for size, *around in zip(inputs.shape[2:], before, behind, strict=True)]
    padded = new_rows((*inputs.shape[:2], *sizes), inputs)
    inner = padded
    for axis, (begin, end) in enumerate(zip(before, behind, strict=True), start=2):
        size = inner.shape[axis] - begin - end
        inner.narrow(axis, 0, begin).zero_()
        inner.narrow(axis, begin + size, end).zero_()
        inner = inner.narrow(axis, begin, size)
    inner.copy_(inputs)
    return padded


def _unfolding_of(module: nn.Module) -> Unfolding:
    """Return how patches are taken from a convolution's padded inputs."""
    conv = cast("_ConvNd", module)
    return Unfolding(tuple(conv.kernel_size), tuple(conv.stride), tuple(conv.dilation))


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
