"""What a person is shown of a run: what it keeps, and what follows from a tokenizer or from the inputs themselves."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from dualform.corpus import Corpus
from dualform.engine.beside_patterns import Media
from dualform.pieces import Tokenizer, vocabulary_size

SMALLEST, LARGEST = 4, 512  # pixels of a side of an input that looks like an image
SCALED_BY = 256  # tests whose smallest and largest numbers become black and white


class SessionMedia:
    """The media of a run; where it keeps no text, a tokenizer says what tokens stand for.

    Attributes:
        labels: the names of the labels.
        scale: mean and deviation, with which an input follows from a pixel.
        tokenizer: turns a prompt into tokens, where the user gave one.
    """

    def __init__(self, kept: Media, tokenizer: Tokenizer | None = None) -> None:
        self._kept = kept
        self.tokenizer = tokenizer
        self.labels: Sequence[str] | None = kept.labels
        self.scale: tuple[float, float] | None = kept.scale

    @cached_property
    def text(self) -> Corpus | None:
        """The training text; or a text without a word whose vocabulary is the tokenizer's; or None."""
        kept = self._kept.text
        if kept is not None or self.tokenizer is None or not vocabulary_size(self.tokenizer):
            return kept
        return Corpus.from_tokens(torch.zeros(0, dtype=torch.int64), tokenizer=self.tokenizer, name="no text is kept")

    def image(self, sample: int) -> Tensor | None:
        """Return the image of a training sample, (H, W[, 3]), if there is one."""
        return self._kept.image(sample)

    @property
    def has_images(self) -> bool:
        """Whether there are images of training samples."""
        return self._kept.has_images


def as_images(inputs: Tensor) -> Tensor | None:
    """Return inputs (M, 1 or 3, H, W) as images for people, (M, H, W[, 3]) uint8; None where they do not look like it.

    The smallest number becomes black and the largest white, in all images alike.

    >>> as_images(torch.linspace(-1, 1, 32).reshape(2, 1, 4, 4)).shape
    torch.Size([2, 4, 4])
    >>> as_images(torch.zeros(2, 10)) is None
    True
    """
    if inputs.dim() != 4 or not len(inputs) or inputs.shape[1] not in (1, 3):
        return None
    if not all(SMALLEST <= side <= LARGEST for side in inputs.shape[2:]):
        return None
    values = inputs.detach().cpu().float().nan_to_num()
    low, high = (float(found) for found in values[:SCALED_BY].aminmax())
    pixels = ((values - low) / (high - low or 1.0)).clamp(0, 1).mul(255).round().to(torch.uint8)
    return pixels[:, 0] if inputs.shape[1] == 1 else pixels.permute(0, 2, 3, 1).contiguous()
