"""The digits that come with scikit-learn, so that every experiment runs anywhere, in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dualform.experiments.datasets.catalogue import provides
from dualform.experiments.datasets.imageset import ImageSet

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@provides("digits", licence="CC BY 4.0, E. Alpaydin and C. Kaynak (UCI)", module="sklearn")
def build_digits(contents: Mapping[str, bytes]) -> ImageSet:
    """Handwritten digits, 1,437 + 360 images of 8 × 8 with values 0 to 16."""
    import numpy as np
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = bunch.images.astype(np.uint8)
    labels = bunch.target.astype(np.int64)
    test = _held_out(labels)
    return ImageSet(
        name="digits",
        train_images=images[~test],
        train_labels=labels[~test],
        test_images=images[test],
        test_labels=labels[test],
        class_names=tuple("0123456789"),
    )


def _held_out(labels: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Mark every fifth image in a fixed random order by class: always the same, a fifth of each class."""
    import numpy as np

    # RandomState, unlike Generator, promises the same numbers in every version of numpy.
    shuffled = np.random.RandomState(0).permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    held_out = np.zeros(len(labels), dtype=np.bool_)
    held_out[by_class[::5]] = True
    return held_out
