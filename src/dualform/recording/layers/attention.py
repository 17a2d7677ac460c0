"""`nn.MultiheadAttention`: its projections, which it hands to one function of torch, as recorded layers.

`in_proj` where query, key and value are one tensor; `in_proj.q` and `in_proj.kv`, or `.q`, `.k` and `.v`, where they
are not (three slices of the same weight); `q_proj`, `k_proj`, `v_proj` where their widths differ; and `out_proj`. Those
that a run never uses do not appear in it. What `add_bias_kv` appends is not covered.
"""

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from dualform.identity.parameter_use import ParameterUse, Span
from dualform.recording.layers.composite import Composite, Report, Tracer, composes
from dualform.recording.layers.layer_kind import LayerKind, present


class Projection(LayerKind):
    """z = W x + b, with W and b whole or some rows of a parameter."""

    name = "MultiheadAttention"
    batch_axis = 1

    def __init__(self, d_in: int, d_out: int, uses: tuple[ParameterUse, ...], *, optional: bool) -> None:
        self._widths = d_in, d_out
        self._uses = uses
        self.optional = optional

    def uses(self, module: nn.Module) -> tuple[ParameterUse, ...]:
        """The weight takes value ⊗ key, the bias takes the value."""
        return present(module, *self._uses)

    def widths(self, module: nn.Module) -> tuple[int, int]:
        """Return the widths of this projection."""
        return self._widths


# The compiler of torch 2.11 takes `functional.linear` inside `linear` below for `linear` itself, without an end.
_LINEAR = functional.linear
SLICES = {"in_proj.q": (0, 1), "in_proj.kv": (1, 3), "in_proj.k": (1, 2), "in_proj.v": (2, 3)}  # in units of E


@composes(nn.MultiheadAttention)
class Attention(Composite):
    """Self- and cross-attention, with any options."""

    key_text = "the input of each projection: `in_proj` (or its slices `.q .k .v .kv`), `out_proj`"

    def parts(self, module: nn.Module) -> Mapping[str, LayerKind]:
        """Return every projection that a call may use."""
        attention = cast("nn.MultiheadAttention", module)
        width = attention.embed_dim
        found: dict[str, LayerKind] = {}
        if attention._qkv_same_embed_dim:
            uses = _uses("in_proj_weight", "in_proj_bias")
            found["in_proj"] = Projection(width, 3 * width, uses, optional=True)
            for name, (start, stop) in SLICES.items():
                rows = start * width, stop * width
                uses = _uses("in_proj_weight", "in_proj_bias", weight_rows=rows, bias_rows=rows)
                found[name] = Projection(width, (stop - start) * width, uses, optional=True)
        else:
            for i, (name, d_in) in enumerate(zip("qkv", (width, attention.kdim, attention.vdim), strict=True)):
                uses = _uses(f"{name}_proj_weight", "in_proj_bias", bias_rows=(i * width, (i + 1) * width))
                found[f"{name}_proj"] = Projection(d_in, width, uses, optional=False)
        uses = _uses("out_proj.weight", "out_proj.bias")
        return found | {"out_proj": Projection(width, width, uses, optional=False)}

    def trace(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], report: Report
    ) -> TorchFunctionMode:
        """Follow the linear maps inside torch's attention function."""
        attention = cast("nn.MultiheadAttention", module)

        def follow(function: FunctionType, query: Tensor, *others: Any, **options: Any) -> Any:
            batched = query.dim() == 3

            def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
                outputs = _LINEAR(inputs, weight, bias)
                name = _name(attention, weight)

                def rows_seen() -> Tensor:
                    rows = inputs.detach()
                    if rows.dim() == 2 and batched:  # the output projection sees (L · B, E)
                        rows = rows.view(-1, query.shape[1], rows.shape[1])
                    elif rows.dim() == 3 and not batched:
                        rows = rows[:, 0]
                    return rows

                if name is not None:
                    report(name, rows_seen, [outputs])
                return outputs

            return _with_linear(function, linear)(query, *others, **options)

        return Tracer({"multi_head_attention_forward": follow})


def _uses(
    weight: str, bias: str, *, weight_rows: Span | None = None, bias_rows: Span | None = None
) -> tuple[ParameterUse, ParameterUse]:
    """Return the uses of a projection's weight and bias, by their names in the module."""
    return (
        ParameterUse("weight", weight, "outer", rows=weight_rows),
        ParameterUse("bias", bias, "bias", rows=bias_rows),
    )


def _with_linear(function: FunctionType, linear: Callable[..., Tensor]) -> FunctionType:
    """Return torch's attention function with another `linear` inside."""
    inside: dict[str, Any] = {**function.__globals__, "linear": linear, "has_torch_function": lambda _: False}
    for name in ("_in_projection_packed", "_in_projection"):
        inside[name] = FunctionType(inside[name].__code__, inside, name, inside[name].__defaults__)
    copy = FunctionType(function.__code__, inside, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _name(attention: nn.MultiheadAttention, weight: Tensor) -> str | None:
    """Return the name of the projection that a weight, or a slice of the packed one, belongs to."""
    if weight is attention.out_proj.weight:
        return "out_proj"
    if not attention._qkv_same_embed_dim:
        return next((f"{n}_proj" for n in "qkv" if weight is getattr(attention, f"{n}_proj_weight")), None)
    packed = attention.in_proj_weight
    if weight is packed:
        return "in_proj"
    row = packed.stride(0) * packed.element_size()
    start = (weight.data_ptr() - packed.data_ptr()) // row
    place = start // attention.embed_dim, (start + len(weight)) // attention.embed_dim
    return next((name for name, found in SLICES.items() if found == place), None)
