"""`nn.Bilinear`: the key is the outer product of the two inputs, the value the error at the output.

z[o] = x₁ᵀ W[o] x₂ + b[o] is linear in the weight: as a matrix (out_features, in1_features · in2_features) it multiplies
the flattened outer product x₁ x₂ᵀ. Keys are that wide, so they take in1_features · in2_features numbers per pattern.
Attention is the product of two attentions: (x₁ · q₁) (x₂ · q₂).
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from dualform.identity.parameter_use import ParameterUse
from dualform.recording.layers.layer_kind import LayerKind, present, records


@records(nn.Bilinear)
class Bilinear(LayerKind):
    """z = W (x₁ ⊗ x₂) + b over any leading shape."""

    name = "Bilinear"
    key_text = "outer product of the two inputs, in1 · in2 wide"
    own_order = True

    def uses(self, module: nn.Module) -> tuple[ParameterUse, ...]:
        """The weight takes value ⊗ key, the bias takes the value."""
        weight, bias = ParameterUse("weight", "weight", "outer"), ParameterUse("bias", "bias", "bias")
        return weight, *present(module, bias)

    def widths(self, module: nn.Module) -> tuple[int, int]:
        """Return (in1_features · in2_features, out_features)."""
        layer = cast("nn.Bilinear", module)
        return layer.in1_features * layer.in2_features, layer.out_features

    def inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """Return the two inputs side by side, (..., in1_features + in2_features)."""
        names = ("input1", "input2")
        pair = [cast("Tensor", given) for given in (*args, *(kwargs[name] for name in names[len(args) :]))]
        return torch.cat(pair, dim=-1)

    def keys(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """Return the outer products of the two inputs, (..., in1_features · in2_features)."""
        layer = cast("nn.Bilinear", module)
        first, second = inputs.split([layer.in1_features, layer.in2_features], dim=-1)
        outer: Tensor = first[..., :, None] * second[..., None, :]
        return outer.flatten(-2)
