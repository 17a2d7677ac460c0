"""Labelled images, split into training and test, and the tensors that the experiments make of them.

Does not know where the images come from.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dualform.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    Images = npt.NDArray[np.uint8]
    Labels = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class ImageSet:
    """Labelled images, split into training and test.

    Attributes:
        name: the data set's name.
        train_images: (N, H, W), or (N, H, W, C) in colour.
        train_labels: (N,) indices into `class_names`.
        test_images: (M, H, W), or (M, H, W, C) in colour.
        test_labels: (M,) indices into `class_names`.
        class_names: what the labels mean.
    """

    name: str
    train_images: Images
    train_labels: Labels
    test_images: Images
    test_labels: Labels
    class_names: tuple[str, ...]

    def __post_init__(self) -> None:
        for part, images, labels in (
            ("training", self.train_images, self.train_labels),
            ("test", self.test_images, self.test_labels),
        ):
            if images.ndim not in (3, 4) or labels.shape != images.shape[:1] or not len(images):
                raise DataError(
                    f"The {part} part of {self.name} has images of shape {images.shape} and labels of shape "
                    f"{labels.shape}; expected (N, H, W) or (N, H, W, C), and (N,), with N > 0."
                )
            if labels.min() < 0 or labels.max() >= len(self.class_names):
                raise DataError(
                    f"The {part} labels of {self.name} run from {labels.min()} to {labels.max()}; expected 0 "
                    f"to {len(self.class_names) - 1}, one per class."
                )
        if self.train_images.shape[1:] != self.test_images.shape[1:]:
            raise DataError(
                f"A training image of {self.name} has the shape {self.train_images.shape[1:]}, a test image "
                f"{self.test_images.shape[1:]}; expected the same."
            )


def standardised(images: ImageSet) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the training and test images as float32 vectors, standardised by the training images.

    `(x - mean) / deviation`, where mean and (population) deviation are single numbers, taken over all values
    of all training images: for MNIST the well-known 0.1307 and 0.3081 of the white level.

    >>> from dualform.experiments.datasets import load
    >>> train, test = standardised(load("digits"))
    >>> train.shape, test.shape, f"{train.std(correction=0):.3f}"
    (torch.Size([1437, 64]), torch.Size([360, 64]), '1.000')

    Returns:
        (N, d) and (M, d), where d counts the values of an image.
    """
    import numpy as np
    import torch

    mean, deviation = moments(images.train_images)
    if deviation == 0:
        raise DataError(f"All training pixels of {images.name} are {mean:g}; expected images that differ.")

    def flatten(part: Images) -> torch.Tensor:
        values = part.reshape(len(part), -1).astype(np.float32)  # (N, d)
        values -= np.float32(mean)
        values /= np.float32(deviation)
        return torch.from_numpy(values)

    return flatten(images.train_images), flatten(images.test_images)


def permuted(images: ImageSet, *, seed: int = 0) -> ImageSet:
    """Return the same images with their pixels in another order, one order for all of them.

    As hard to learn for a network that has no notion of space, but a different task. A pixel keeps its
    channels together.

    >>> from dualform.experiments.datasets import load
    >>> permuted(load("digits")).name
    'digits-permuted'
    """
    import numpy as np

    height, width = images.train_images.shape[1:3]
    # RandomState, unlike Generator, promises the same numbers in every version of numpy.
    order = np.random.RandomState(seed).permutation(height * width)

    def reorder(part: Images) -> Images:
        pixels = part.reshape(len(part), height * width, *part.shape[3:])
        return np.take(pixels, order, axis=1).reshape(part.shape)

    return dataclasses.replace(
        images,
        name=f"{images.name}-permuted",
        train_images=reorder(images.train_images),
        test_images=reorder(images.test_images),
    )


def moments(pixels: Images) -> tuple[float, float]:
    """Return mean and population deviation, exact, from the counts of the 256 values a pixel can have."""
    import numpy as np

    counts = np.zeros(256, dtype=np.int64)
    for start in range(0, len(pixels), 4096):  # in parts: bincount makes 8 bytes of every pixel
        counts += np.bincount(pixels[start : start + 4096].ravel(), minlength=256)
    values = np.arange(256)
    total, first, second = (int((counts * values**power).sum()) for power in (0, 1, 2))
    mean = first / total
    return mean, float(np.sqrt((second * total - first * first) / (total * total)))
