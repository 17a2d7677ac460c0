"""A small residual network with BatchNorm, in the manner of ResNets, for images of one channel."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional


class ResidualBlock(nn.Module):
    """Two convolutions with BatchNorm beside a shortcut; with another width the block halves height and width."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = 1 if before == after else 2
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut = nn.Identity() if before == after else nn.Conv2d(before, after, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W) -> (B, C', H', W')
        """Return the block's output."""
        inner = self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x)))))
        return functional.relu(inner + self.shortcut(x))


class ResidualNetwork(nn.Module):
    """A first convolution of stride 2, residual blocks of the given widths, the mean over places, a linear layer."""

    def __init__(self, widths: Sequence[int], classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, widths[0], 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(widths[0])
        pairs = zip([widths[0], *widths[:-1]], widths, strict=True)
        self.blocks = nn.Sequential(*(ResidualBlock(before, after) for before, after in pairs))
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:  # (B, 1, H, W) -> (B, classes)
        """Return the logits."""
        x = self.blocks(functional.relu(self.norm(self.conv(x))))
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


def residual(widths: Sequence[int], classes: int) -> ResidualNetwork:
    """Make a residual network.

    >>> len(residual([8, 16], 10).blocks)
    2
    """
    return ResidualNetwork(widths, classes)
