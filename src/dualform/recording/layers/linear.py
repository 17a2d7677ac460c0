"""`nn.Linear`, and the transposed linear layer of transformers: key is the input, value the error at the output."""

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from dualform.identity.parameter_use import ParameterUse
from dualform.recording.layers.layer_kind import LayerKind, present, records, records_elsewhere


@records(nn.Linear)
class Linear(LayerKind):
    """z = W x + b over any leading shape."""

    name = "Linear"
    key_text = "input"

    def uses(self, module: nn.Module) -> tuple[ParameterUse, ...]:
        """The weight takes value ⊗ key, the bias takes the value."""
        weight, bias = ParameterUse("weight", "weight", "outer"), ParameterUse("bias", "bias", "bias")
        return weight, *present(module, bias)

    def widths(self, module: nn.Module) -> tuple[int, int]:
        """Return (in_features, out_features)."""
        linear = cast("nn.Linear", module)
        return linear.in_features, linear.out_features


@records_elsewhere("transformers", "Conv1D")
class TransposedLinear(LayerKind):
    """z = x W + b with W stored as (d_in, d_out), as GPT-2 has it."""

    name = "transformers.Conv1D"
    key_text = "input; the weight is stored transposed"

    def uses(self, module: nn.Module) -> tuple[ParameterUse, ...]:
        """The weight takes key ⊗ value, the bias takes the value."""
        return ParameterUse("weight", "weight", "transposed"), ParameterUse("bias", "bias", "bias")

    def widths(self, module: nn.Module) -> tuple[int, int]:
        """Return the weight's shape."""
        d_in, d_out = cast("Tensor", module.weight).shape
        return d_in, d_out

    def inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """Return the input."""
        return cast("Tensor", args[0] if args else kwargs["x"])
