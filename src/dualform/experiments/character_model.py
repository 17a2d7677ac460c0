"""The small character Transformer of the evaluation of effects, of plain linear layers: a stack of them trains fast."""

import torch
from torch import Tensor, nn
from torch.nn import functional

FIRST, LAST = 32, 126  # printable ASCII; everything else is one more character
CHARACTERS = LAST - FIRST + 2


def encode_characters(text: str) -> Tensor:
    """Return a text as numbers of characters.

    >>> encode_characters("A!é")
    tensor([33,  1, 95])
    """
    codes = torch.tensor([ord(character) for character in text])
    return torch.where((codes >= FIRST) & (codes <= LAST), codes - FIRST, CHARACTERS - 1)


class CharacterBlock(nn.Module):
    """Causal attention with one matrix for queries, keys and values, and a feed-forward part."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.between = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, L, d)
        """Return x plus the outputs of attention and of the feed-forward part."""
        rows, length, width = x.shape
        q, k, v = self.qkv(self.before(x)).reshape(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5  # (B, H, L, L)
        ahead = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        seen = scores.masked_fill(ahead, -torch.inf).softmax(dim=-1) @ v
        x = x + self.project(seen.transpose(1, 2).reshape(rows, length, width))
        added: Tensor = self.down(functional.gelu(self.up(self.between(x))))
        return x + added


class Characters(nn.Module):
    """Predicts each next character of a passage."""

    def __init__(self, width: int, length: int, blocks: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CHARACTERS, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(CharacterBlock(width, heads) for _ in range(blocks))
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, CHARACTERS)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, L) -> (B, L, V)
        """Return the logits of the next character at each place."""
        places = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        x = self.tokens(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.last(x))
        return logits


def characters(*, width: int, length: int, blocks: int = 2, heads: int = 4) -> Characters:
    """Make a character Transformer."""
    return Characters(width, length, blocks, heads)
