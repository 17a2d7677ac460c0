"""What a run may keep beside its patterns: pictures, texts and tests for people, and the rest of the model's state.

Here is what a reader of a run sees of them. How they are kept is the store's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from dualform.corpus import Corpus


@dataclass(frozen=True, slots=True, eq=False)
class Tests:
    """The test examples that a run keeps."""

    inputs: Tensor  # (M, ...)
    targets: Tensor | None  # (M,)
    images: Tensor | None  # (M, H, W[, 3]) uint8, what a person should see


class Media(Protocol):
    """What a run keeps for people to look at; anything may be missing.

    Attributes:
        labels: the names of the labels.
        scale: mean and deviation, with which an input follows from a pixel: (pixel - mean) / deviation.
    """

    labels: Sequence[str] | None
    scale: tuple[float, float] | None

    @property
    def text(self) -> Corpus | None:
        """The training text; one that does not fit the recorded places and tokens is an error."""

    def image(self, sample: int) -> Tensor | None:
        """Return the image of a training sample, (H, W[, 3]), if there is one."""

    @property
    def has_images(self) -> bool:
        """Whether there are images of training samples."""


@dataclass(frozen=True, slots=True)
class KnownState:
    """What a run knows of the uncovered state where its recording ended.

    Attributes:
        values: the parts that are kept by value.
        checksums: the xxh3 checksum of each part that is known by its checksum alone.
        unknown: the parts that are not known, with the reason.
    """

    values: Mapping[str, Tensor] = field(default_factory=dict)
    checksums: Mapping[str, str] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)


def lossy_text(live: Tensor, value: Tensor) -> str:
    """Say that a tensor's dtype cannot hold the value that was copied into it; nothing where it can."""
    if live.dtype == value.dtype or torch.equal(live.detach().cpu().to(value.dtype), value.cpu()):
        return ""
    names = [str(tensor.dtype).removeprefix("torch.") for tensor in (live, value)]
    return f"is {names[0]} in this model, which cannot hold the recorded {names[1]} values"
