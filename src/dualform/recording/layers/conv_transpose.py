"""Transposed convolutions: the key is the patch of inputs that reach an output location, the value the error there.

A transposed convolution is a linear layer at every output location too, `z[o] = W · patch(o) + b`. The patch of a
location o holds, for each place k of the kernel, the input at i with `o = stride · i − padding + dilation · k`, and
zero where no input is there. A pattern's position is its output location.

With a stride most elements of a key are zero, and they are stored like all others: for a kernel of 4 × 4 and a stride
of 2 these keys take 64 times the input's bytes.
"""

import math
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvTransposeNd

from dualform.errors import RefusedError
from dualform.identity.parameter_use import ParameterUse
from dualform.recording.layers.kind import LayerKind, present, records


class TransposedConvolution(LayerKind):
    """z = W · patch + b at every output location; stride, padding, output padding, dilation, groups."""

    batch_axis = 0
    own_order = True

    def uses(self, module: nn.Module) -> tuple[ParameterUse, ...]:
        """The kernel takes patch ⊗ value, group by group; the bias takes the value."""
        groups = cast("_ConvTransposeNd", module).groups
        weight = ParameterUse("weight", "weight", "transposed_kernel", groups=groups if groups > 1 else None)
        return weight, *present(module, ParameterUse("bias", "bias", "bias"))

    def widths(self, module: nn.Module) -> tuple[int, int]:
        """Return (channels × kernel, out_channels)."""
        conv = cast("_ConvTransposeNd", module)
        return conv.in_channels * math.prod(conv.kernel_size), conv.out_channels

    def inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """Return the input, (B, channels, ...) or without the batch; a call that chooses its output size is refused."""
        if args[1:] or kwargs.get("output_size") is not None:
            raise RefusedError(
                "A transposed convolution was called with output_size, which changes the places of its patterns from "
                "call to call. Give the module the output_padding that makes this size instead."
            )
        return cast("Tensor", args[0] if args else kwargs["input"])

    def keys(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """Return the patches, (B, *output locations, channels × kernel).

        The input is laid out with its stride and a margin around it, and a window of the kernel's extent moves over
        that by one place per output location. The window is read backwards, because `i` falls as `k` grows.
        """
        conv = cast("_ConvTransposeNd", module)
        axes = len(conv.kernel_size)
        if inputs.dim() == axes + 1:  # one image
            inputs = inputs[None]
        sizes = [(n - 1) * stride + 1 for n, stride in zip(inputs.shape[2:], conv.stride, strict=True)]
        spread = inputs.new_zeros(*inputs.shape[:2], *sizes)
        spread[(slice(None), slice(None), *(slice(None, None, stride) for stride in conv.stride))] = inputs
        margins: list[int] = []
        for axis in reversed(range(axes)):  # as `functional.pad` takes them: last axis first
            margin = conv.dilation[axis] * (conv.kernel_size[axis] - 1) - cast("int", conv.padding[axis])
            margins += [margin, margin + conv.output_padding[axis]]  # negative ones cut off
        patches = functional.pad(spread, margins)
        for axis, (size, dilation) in enumerate(zip(conv.kernel_size, conv.dilation, strict=True)):
            patches = patches.unfold(axis + 2, dilation * (size - 1) + 1, 1)[..., ::dilation]
        # (B, channels, *locations, *kernel) -> (B, *locations, channels, *kernel)
        patches = patches.flip([*range(axes + 2, 2 * axes + 2)])
        return patches.movedim(1, axes + 1).flatten(axes + 1)

    def values(self, module: nn.Module, inputs: Tensor, error: Tensor) -> Tensor:
        """Return the errors, (B, *output locations, out_channels)."""
        axes = len(cast("_ConvTransposeNd", module).kernel_size)
        return (error[None] if error.dim() == axes + 1 else error).movedim(1, -1)


@records(nn.ConvTranspose1d)
class ConvTranspose1d(TransposedConvolution):
    """One axis."""

    name = "ConvTranspose1d"


@records(nn.ConvTranspose2d)
class ConvTranspose2d(TransposedConvolution):
    """Two axes."""

    name = "ConvTranspose2d"


@records(nn.ConvTranspose3d)
class ConvTranspose3d(TransposedConvolution):
    """Three axes."""

    name = "ConvTranspose3d"
