"""`nn.EmbeddingBag`: a pattern is one token of a bag; its key is the token, its value the token's part of the error.

A bag's output is a weighted sum of rows of the table, `z = Σ_i w_i · W[token_i]`, with w_i = 1 (sum), 1 / n (mean of
the n tokens) or the call's `per_sample_weights`. So the row of token i takes `w_i · e` of the bag's error e. A query is
a token too, and the layer's output for it is the token's row, before the bag adds rows up.

Tokens that are padding are in no bag: their values are zero. The mode "max" is not covered, nor are the options that
`nn.Embedding` is not covered with.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from dualform.recording.layers.embedding import Embedding
from dualform.recording.layers.layer_kind import records


@records(nn.EmbeddingBag)
class EmbeddingBag(Embedding):
    """z = Σ w · W[token] over each bag: bags of one size (B, N), or tokens (T,) in a row with the bags' offsets."""

    name = "EmbeddingBag"
    key_text = "token, an integer; a pattern is one token of a bag, its value the token's part of the bag's error"
    own_order = True

    def unsupported(self, module: nn.Module) -> str:
        """Name an option with which a token's row does not take a multiple of its bag's error."""
        largest = 'mode="max"' if cast("nn.EmbeddingBag", module).mode == "max" else ""
        return ", ".join(filter(None, (largest, super().unsupported(module))))

    def inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """Return for each token its number, the number of its bag, and its weight: (B, N, 3) or (T, 3) in float64."""
        names = ("input", "offsets", "per_sample_weights")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        tokens, offsets, weights = (cast("Tensor | None", given.get(name)) for name in names)
        assert tokens is not None, "a call of an EmbeddingBag has tokens"
        if offsets is None:
            bags = torch.arange(len(tokens), device=tokens.device)[:, None].expand_as(tokens)
        else:
            places = torch.arange(len(tokens), device=tokens.device)
            bags = torch.searchsorted(offsets.to(places), places, right=True) - 1
        weights = torch.ones_like(tokens) if weights is None else weights.detach()
        return torch.stack([tokens.double(), bags.double(), weights.double()], dim=-1)

    def keys(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """Return the tokens, (B, N, 1) or (T, 1)."""
        return inputs[..., :1].long()

    def values(self, module: nn.Module, inputs: Tensor, error: Tensor) -> Tensor:
        """Return each token's part of its bag's error, (B, N, embedding_dim) or (T, embedding_dim)."""
        layer = cast("nn.EmbeddingBag", module)
        tokens, bags, weights = inputs[..., 0].long(), inputs[..., 1].long(), inputs[..., 2].to(error.dtype)
        if layer.padding_idx is not None:
            weights = weights.masked_fill(tokens == layer.padding_idx, 0)
        if layer.mode == "mean":
            sizes = weights.new_zeros(len(error)).index_add_(0, bags.flatten(), weights.flatten())
            weights = weights / sizes.clamp(min=1)[bags]
        return error[bags] * weights[..., None]
