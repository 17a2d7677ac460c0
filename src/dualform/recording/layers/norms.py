"""Normalisations: their affine part multiplies the normalised input, element by element, and adds a bias.

The key is the normalised input, computed again from the input as the layer computes it; value ⊙ key is the gradient of
the factor. What the normalisation itself does to its input is no parameter.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from dualform.identity.parameter_use import ParameterUse
from dualform.recording.layers.layer_kind import LayerKind, present, records
from dualform.torch_modes import without_gradients


class Norm(LayerKind):
    """y = w ⊙ normalised(x) + b."""

    key_text = "normalised input, elementwise"

    own_order = True

    def uses(self, module: nn.Module) -> tuple[ParameterUse, ...]:
        """The weight is a factor, the bias a bias; either may be missing."""
        return present(module, ParameterUse("weight", "weight", "scale"), ParameterUse("bias", "bias", "bias"))

    def widths(self, module: nn.Module) -> tuple[int, int]:
        """Return the number of factors, twice."""
        parameter = cast("Tensor", module.weight if module.weight is not None else module.bias)
        return parameter.numel(), parameter.numel()

    def inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """Return the input."""
        return cast("Tensor", args[0] if args else kwargs[next(iter(kwargs))])

    @abstractmethod
    def normalise(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """Return the input as the factor meets it."""


class _LastAxes(Norm):
    """Normalises over the last axes; patterns are all the others."""

    def leading(self, module: nn.Module, inputs: Tensor) -> tuple[int, ...]:
        """Return the axes before those."""
        if type(self).keys is not _LastAxes.keys:
            return super().leading(module, inputs)
        return tuple(inputs.shape[: -len(cast("tuple[int, ...]", module.normalized_shape))])

    def keys(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """Return the normalised input, its last axes flattened."""
        shape = cast("tuple[int, ...]", module.normalized_shape)
        return self.normalise(module, inputs).flatten(-len(shape))

    def values(self, module: nn.Module, inputs: Tensor, error: Tensor) -> Tensor:
        """Return the error, its last axes flattened."""
        shape = cast("tuple[int, ...]", module.normalized_shape)
        return error.reshape(inputs.shape).flatten(-len(shape))


class _Channels(Norm):
    """One factor per channel, the second axis; patterns are (batch, places)."""

    batch_axis = 0

    def keys(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """Return the normalised input, (B, ..., channels)."""
        return self.normalise(module, inputs).movedim(1, -1)

    def values(self, module: nn.Module, inputs: Tensor, error: Tensor) -> Tensor:
        """Return the error, (B, ..., channels)."""
        return error.movedim(1, -1)


@records(nn.LayerNorm)
class LayerNorm(_LastAxes):
    """Mean 0 and deviation 1 over the last axes."""

    name = "LayerNorm"

    def normalise(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """Return the normalised input."""
        norm = cast("nn.LayerNorm", module)
        return functional.layer_norm(inputs, norm.normalized_shape, eps=norm.eps)


@records(nn.RMSNorm)
class RMSNorm(_LastAxes):
    """Mean square 1 over the last axes."""

    name = "RMSNorm"

    def normalise(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """Return the normalised input."""
        norm = cast("nn.RMSNorm", module)
        return functional.rms_norm(inputs, list(norm.normalized_shape), eps=norm.eps)


@records(nn.GroupNorm)
class GroupNorm(_Channels):
    """Mean 0 and deviation 1 over groups of channels."""

    name = "GroupNorm"

    def normalise(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """Return the normalised input."""
        norm = cast("nn.GroupNorm", module)
        return functional.group_norm(inputs, norm.num_groups, eps=norm.eps)


class _Batch(_Channels):
    """Mean 0 and deviation 1 over the batch in training; the running ones in evaluation."""

    @without_gradients
    def normalise(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """Return the normalised input."""
        norm = cast("_BatchNorm", module)
        running = not norm.training and norm.running_mean is not None
        return functional.batch_norm(
            inputs,
            norm.running_mean if running else None,
            norm.running_var if running else None,
            training=not running,
            eps=norm.eps,
        )


@records(nn.BatchNorm1d)
class BatchNorm1d(_Batch):
    """(B, C) or (B, C, L)."""

    name = "BatchNorm1d"


@records(nn.BatchNorm2d)
class BatchNorm2d(_Batch):
    """(B, C, H, W)."""

    name = "BatchNorm2d"


@records(nn.BatchNorm3d)
class BatchNorm3d(_Batch):
    """(B, C, D, H, W)."""

    name = "BatchNorm3d"
