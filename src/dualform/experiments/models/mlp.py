"""A multi-layer perceptron, the network of the image studies."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional


class MLP(nn.Module):
    """Linear layers with ReLU between them: `widths` are those of the input, the hidden layers and the output."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:  # (B, d) -> (B, classes)
        """Return the logits."""
        for layer in list(self.layers)[:-1]:
            x = functional.relu(layer(x))
        logits: Tensor = self.layers[-1](x)
        return logits


def mlp(widths: Sequence[int]) -> MLP:
    """Make an MLP.

    >>> [tuple(layer.weight.shape) for layer in mlp([64, 32, 10]).layers]
    [(32, 64), (10, 32)]
    """
    return MLP(widths)
