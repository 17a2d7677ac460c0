"""The networks that evaluations of effects retrain: small enough that thousands of trainings are a matter of minutes.

Each takes the inputs of one kind of data, images as rows of pixels or passages as numbers of characters, and returns
logits whose last axis is the classes.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from dualform.experiments.character_model import CHARACTERS


class SmallCNN(nn.Module):
    """Two convolutions of stride 2 and two linear layers, for square images of one channel given as rows of pixels."""

    def __init__(self, pixels: int, channels: tuple[int, int], units: int, classes: int) -> None:
        super().__init__()
        self.side = math.isqrt(pixels)
        self.first = nn.Conv2d(1, channels[0], 3, stride=2, padding=1)
        self.second = nn.Conv2d(channels[0], channels[1], 3, stride=2, padding=1)
        left = -(-self.side // 4)
        self.hidden = nn.Linear(channels[1] * left * left, units)
        self.head = nn.Linear(units, classes)

    def forward(self, x: Tensor) -> Tensor:  # (B, pixels) -> (B, classes)
        """Return the logits."""
        x = functional.relu(self.first(x.reshape(len(x), 1, self.side, self.side)))
        x = functional.relu(self.second(x))
        logits: Tensor = self.head(functional.relu(self.hidden(x.flatten(1))))
        return logits


class ResidualBlockMLP(nn.Module):
    """What a normalisation and two linear layers with a ReLU between them add to their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, d)
        """Return x plus the block's own output."""
        added: Tensor = self.down(functional.relu(self.up(self.norm(x))))
        return x + added


class ResidualMLP(nn.Module):
    """A linear layer, residual blocks, a normalisation and a linear head."""

    def __init__(self, d_in: int, width: int, blocks: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(d_in, width)
        self.blocks = nn.ModuleList(ResidualBlockMLP(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:  # (B, d_in) -> (B, classes)
        """Return the logits."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class CharacterLSTM(nn.Module):
    """Predicts each next character of a passage: an embedding, one LSTM layer, a linear head.

    Attributes:
        written_out: compute the LSTM by plain products, which `torch.func.vmap` can train a stack of, and not by
            torch's own kernel, which is recorded. Both give the same numbers, but for rounding.
    """

    def __init__(self, embedding: int, units: int) -> None:
        super().__init__()
        self.written_out = False
        self.tokens = nn.Embedding(CHARACTERS, embedding)
        self.lstm = nn.LSTM(embedding, units, batch_first=True)
        self.head = nn.Linear(units, CHARACTERS)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, L) -> (B, L, V)
        """Return the logits of the next character at each place."""
        x = self.tokens(tokens)
        logits: Tensor = self.head(self._written_out(x) if self.written_out else self.lstm(x)[0])
        return logits

    def _written_out(self, x: Tensor) -> Tensor:  # (B, L, d) -> (B, L, h)
        layer, weights = self.lstm, dict(self.lstm.named_parameters())
        from_inputs = functional.linear(x, weights["weight_ih_l0"], weights["bias_ih_l0"])
        h = c = x.new_zeros(len(x), layer.hidden_size)
        outputs = []
        for place in range(x.shape[1]):
            gates = from_inputs[:, place] + functional.linear(h, weights["weight_hh_l0"], weights["bias_hh_l0"])
            i, f, g, o = gates.chunk(4, dim=1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        return torch.stack(outputs, dim=1)
