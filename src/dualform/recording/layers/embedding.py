"""`nn.Embedding`: the key is the token, an integer that stands for a one-hot vector; its row takes the value.

Attention is 1 where tokens are equal, else 0. Sparse gradients, `max_norm` (which edits the table in every forward) and
`scale_grad_by_freq` are not covered.
"""

from typing import cast

from torch import Tensor, nn

from dualform.identity.parameter_use import ParameterUse
from dualform.recording.layers.layer_kind import LayerKind, records


@records(nn.Embedding)
class Embedding(LayerKind):
    """z = W[token] over any shape of tokens."""

    name = "Embedding"
    key_text = "token, an integer; attention is 1 where tokens are equal, else 0"

    def unsupported(self, module: nn.Module) -> str:
        """Name an option with which a value does not go to its token's row as it is."""
        table = cast("nn.Embedding", module)
        options = {
            "sparse=True": table.sparse,
            "max_norm": table.max_norm is not None,
            "scale_grad_by_freq=True": table.scale_grad_by_freq,
        }
        return ", ".join(option for option, chosen in options.items() if chosen)

    def uses(self, module: nn.Module) -> tuple[ParameterUse, ...]:
        """The table takes values by row."""
        return (ParameterUse("weight", "weight", "rows"),)

    def widths(self, module: nn.Module) -> tuple[int, int]:
        """Return (1, embedding_dim)."""
        return 1, cast("nn.Embedding", module).embedding_dim

    def keys(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """Return the tokens with an axis of width 1 behind."""
        return inputs[..., None].long()

    def values(self, module: nn.Module, inputs: Tensor, error: Tensor) -> Tensor:
        """Return the error, zero where the token is padding: autograd drops it there."""
        padding = cast("nn.Embedding", module).padding_idx
        return error if padding is None else error.masked_fill((inputs == padding)[..., None], 0)
