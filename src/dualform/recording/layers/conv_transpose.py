"""Transposed convolutions: the key is the patch of inputs that reach an output location, the value the error there.

A transposed convolution is a linear layer at every output location too, `z[o] = W · patch(o) + b`. The patch of a
location o holds, for each place k of the kernel, the input at i with `o = stride · i − padding + dilation · k`, and
zero where no input is there. A pattern's position is its output location.

With a stride most elements of a key are zero, and they are stored like all others: for a kernel of 4 × 4 and a stride
of 2 these keys take 64 times the input's bytes.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvTransposeNd

from dualform.identity.parameter_use import ParameterUse
from dualform.recording.layers.conv import Convolution
from dualform.recording.layers.layer_kind import LayerKind, present, records


class TransposedConvolution(Convolution):
    """z = W · patch + b at every output location; stride, padding, output padding or size, dilation, groups."""

    key_text = "the inputs that reach an output location, zero where the stride has none; position = output location"

    _module: _ConvTransposeNd  # of a kind that serves one module

    def uses(self, module: nn.Module) -> tuple[ParameterUse, ...]:
        """The kernel takes patch ⊗ value, group by group; the bias takes the value."""
        groups = cast("_ConvTransposeNd", module).groups
        weight = ParameterUse("weight", "weight", "transposed_kernel", groups=groups if groups > 1 else None)
        return weight, *present(module, ParameterUse("bias", "bias", "bias"))

    def widths(self, module: nn.Module) -> tuple[int, int]:
        """Return (channels × kernel, out_channels)."""
        conv = cast("_ConvTransposeNd", module)
        return conv.in_channels * math.prod(conv.kernel_size), conv.out_channels

    def for_module(self, module: nn.Module) -> LayerKind:
        """Return a copy that knows the module, by which a call's `output_size` is understood."""
        mine = copy.copy(self)
        mine._module = cast("_ConvTransposeNd", module)
        return mine

    def inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """Return the input, (B, channels, ...) or without the batch.

        Where the call chooses its output size, return the input as it is laid out for that size, with one more axis in
        front, (1, B, channels, ...): nothing else tells the size when keys are made of it.
        """
        given = super().inputs(args, kwargs)
        output_size = args[1] if len(args) > 1 else kwargs.get("output_size")
        if output_size is None:
            return given
        conv, axes = self._module, len(self._module.kernel_size)
        padding = conv._output_padding(
            given,
            output_size,
            conv.stride,  # type: ignore[arg-type]
            conv.padding,  # type: ignore[arg-type]
            conv.kernel_size,  # type: ignore[arg-type]
            axes,
            conv.dilation,  # type: ignore[arg-type]
        )
        return _laid_out(conv, given, padding)[None]

    def keys(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """Return the patches, (B, *output locations, channels × kernel).

        A window of the kernel's extent moves over the laid out input by one place per output location. The window is
        read backwards, because `i` falls as `k` grows.
        """
        conv = cast("_ConvTransposeNd", module)
        axes = len(conv.kernel_size)
        patches = inputs[0] if inputs.dim() == axes + 3 else _laid_out(conv, inputs, conv.output_padding)
        for axis, (size, dilation) in enumerate(zip(conv.kernel_size, conv.dilation, strict=True)):
            patches = patches.unfold(axis + 2, dilation * (size - 1) + 1, 1)[..., ::dilation]
        # (B, channels, *locations, *kernel) -> (B, *locations, channels, *kernel)
        patches = patches.flip([*range(axes + 2, 2 * axes + 2)])
        return patches.movedim(1, axes + 1).flatten(axes + 1)


def _laid_out(conv: _ConvTransposeNd, inputs: Tensor, output_padding: Sequence[int]) -> Tensor:
    """Return the inputs one stride apart, with zeros between and around them, (B, channels, ...).

    The place of output location o under place k of the kernel is o + dilation · (kernel size − 1 − k).

    Args:
        conv: the transposed convolution.
        inputs: (B, channels, ...), or without the batch.
        output_padding: how many output locations each axis has behind those that the other options give.
    """
    axes = len(conv.kernel_size)
    batch = inputs[None] if inputs.dim() == axes + 1 else inputs
    sizes = [(n - 1) * stride + 1 for n, stride in zip(batch.shape[2:], conv.stride, strict=True)]
    spread = batch.new_zeros(*batch.shape[:2], *sizes)
    spread[(slice(None), slice(None), *(slice(None, None, stride) for stride in conv.stride))] = batch
    margins: list[int] = []
    for axis in reversed(range(axes)):  # as `functional.pad` takes them: last axis first
        margin = conv.dilation[axis] * (conv.kernel_size[axis] - 1) - cast("int", conv.padding[axis])
        margins += [margin, margin + output_padding[axis]]  # a negative margin cuts off
    return functional.pad(spread, margins)


@records(nn.ConvTranspose1d)
class ConvTranspose1d(TransposedConvolution):
    """A transposed convolution over one axis."""

    name = "ConvTranspose1d"


@records(nn.ConvTranspose2d)
class ConvTranspose2d(TransposedConvolution):
    """A transposed convolution over two axes."""

    name = "ConvTranspose2d"


@records(nn.ConvTranspose3d)
class ConvTranspose3d(TransposedConvolution):
    """A transposed convolution over three axes."""

    name = "ConvTranspose3d"
