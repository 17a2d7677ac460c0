"""A small decoder-only Transformer whose every projection is a linear layer of its own, so that each is recorded."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from dualform.errors import QueryError


class CausalAttention(nn.Module):
    """Causal self-attention with separate projections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:  # (B, L, d) -> (B, L, d)
        """Mix each position with the positions before it."""
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (projection(x).reshape(shape).transpose(1, 2) for projection in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, L, d/H)
        outputs: Tensor = self.out(mixed.transpose(1, 2).reshape(x.shape))
        return outputs


class TransformerBlock(nn.Module):
    """Attention and a two-layer perceptron, each behind a normalisation and beside a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.before_attention = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads)
        self.before_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, L, d) -> (B, L, d)
        """Add the outputs of attention and of the perceptron to the input."""
        x = x + self._drop(self.attention(self.before_attention(x)))
        return x + self._drop(self.down(functional.gelu(self.up(self.before_mlp(x)))))

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training)


class TransformerLanguageModel(nn.Module):
    """Token and position embeddings, blocks, a normalisation and the softmax layer. It carries no state."""

    def __init__(self, *, tokens: int, width: int, heads: int, blocks: int, context: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(tokens, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, dropout) for _ in range(blocks))
        self.before_softmax = nn.LayerNorm(width)
        self.softmax = nn.Linear(width, tokens)

    def forward(self, tokens: Tensor, state: None = None) -> tuple[Tensor, None]:  # (B, L) -> (B, L, V)
        """Return the logits at every position, and no state."""
        if tokens.shape[1] > self.context:
            raise QueryError(f"There are {tokens.shape[1]} tokens; this model's context is {self.context}.")
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.embedding(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return self.softmax(self.before_softmax(x)), None


def transformer(
    *, tokens: int, width: int, heads: int, blocks: int, context: int, dropout: float = 0.0
) -> TransformerLanguageModel:
    """Make a Transformer language model.

    >>> model = transformer(tokens=9, width=8, heads=2, blocks=1, context=16)
    >>> model(torch.zeros(2, 5, dtype=torch.int64))[0].shape
    torch.Size([2, 5, 9])
    """
    return TransformerLanguageModel(
        tokens=tokens, width=width, heads=heads, blocks=blocks, context=context, dropout=dropout
    )
