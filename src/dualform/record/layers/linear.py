"""`nn.Linear`: the key is the input, the value is the error at the output."""

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from dualform.record.layers.kind import LayerKind, Role, records


@records(nn.Linear)
class Linear(LayerKind):
    """z = W x + b over any leading shape."""

    name = "Linear"

    def roles(self, module: nn.Module) -> Mapping[str, Role]:
        """The weight takes value ⊗ key, the bias takes the value."""
        return {"weight": "weight", "bias": "bias"} if module.bias is not None else {"weight": "weight"}

    def widths(self, module: nn.Module) -> tuple[int, int]:
        """Return (in_features, out_features)."""
        linear = cast("nn.Linear", module)
        return linear.in_features, linear.out_features

    def inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """Return the input."""
        return cast("Tensor", args[0] if args else kwargs["input"])
