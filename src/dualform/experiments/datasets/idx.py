"""The idx format of MNIST and its relatives: bytes in, arrays out.

Layout: two zero bytes, a type code, the number of dimensions, each dimension as a big-endian 32-bit number,
then the values in row-major order. Only unsigned bytes (type code 8) are read. Does not open files.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dualform.errors import DataError
from dualform.experiments.datasets.imageset import ImageSet

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
"""The files of MNIST and its relatives."""

_UNSIGNED_BYTE = 8


def parse(content: bytes, *, name: str) -> npt.NDArray[np.uint8]:
    r"""Return the array that an idx file holds.

    >>> parse(b"\x00\x00\x08\x01\x00\x00\x00\x03" + b"\x07\x02\x01", name="labels")
    array([7, 2, 1], dtype=uint8)

    Args:
        content: the uncompressed content of the file.
        name: what to call the file in an error.

    Raises:
        DataError: the content is no idx file of unsigned bytes, or not all of one, or more than one.
    """
    import numpy as np

    if len(content) < 4 or content[:2] != b"\0\0":
        raise DataError(f"{name} starts with {content[:4]!r}; expected an idx file, which starts with two zero bytes.")
    code, dimensions = content[2], content[3]
    if code != _UNSIGNED_BYTE:
        raise DataError(f"{name} holds values of idx type {code}; expected type 8, unsigned bytes.")
    start = 4 + 4 * dimensions
    if dimensions == 0 or len(content) < start:
        raise DataError(f"{name} has {len(content)} bytes and claims {dimensions} dimensions; its header is cut short.")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    size = start + math.prod(shape)
    if len(content) != size:
        raise DataError(
            f"{name} has {len(content)} bytes; its header promises {size}, for shape {shape}. Fetch it again."
        )
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape).copy()


def image_set(name: str, contents: Mapping[str, bytes], *, class_names: tuple[str, ...]) -> ImageSet:
    """Make an image set of the content of the four `FILES`."""
    import numpy as np

    train_images, train_labels, test_images, test_labels = (
        parse(contents[file], name=f"{name}/{file}") for file in FILES
    )
    return ImageSet(
        name=name,
        train_images=train_images,
        train_labels=train_labels.astype(np.int64),
        test_images=test_images,
        test_labels=test_labels.astype(np.int64),
        class_names=class_names,
    )
