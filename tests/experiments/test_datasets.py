"""The data sets themselves: the formats they are read from, and the images that come out."""

import io
import json
import struct
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dualform.errors import DataError
from dualform.experiments import datasets
from dualform.experiments.datasets import catalogue, cifar10, idx, sources
from dualform.experiments.datasets.contents import SourceError
from dualform.experiments.datasets.imageset import ImageSet


def idx_bytes(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


IMAGES = np.arange(3 * 2 * 2, dtype=np.uint8).reshape(3, 2, 2)
LABELS = np.array([1, 0, 1], dtype=np.uint8)
TINY = dict(zip(idx.FILES, map(idx_bytes, (IMAGES, LABELS, IMAGES[:2], LABELS[:2])), strict=True))


# The idx format


@pytest.mark.parametrize("shape", [(3,), (3, 2), (2, 3, 4), (0, 5)])
def test_idx_reads_what_was_written(shape: tuple[int, ...]) -> None:
    array = np.random.RandomState(0).randint(256, size=shape).astype(np.uint8)
    read = idx.parse(idx_bytes(array), name="it")
    np.testing.assert_array_equal(read, array)
    assert read.flags.writeable


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "two zero bytes"),
        (b"\x1f\x8b\x08\x00" + bytes(20), "two zero bytes"),
        (b"\0\0\x0d\x01\0\0\0\x01" + bytes(4), "idx type 13"),
        (b"\0\0\x08\x00", "0 dimensions"),
        (b"\0\0\x08\x03\0\0\0\x01", "header is cut short"),
        (idx_bytes(IMAGES)[:-1], "27 bytes; its header promises 28"),
        (idx_bytes(IMAGES) + b"\0", "29 bytes; its header promises 28"),
    ],
)
def test_idx_refuses_malformed(content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message) as raised:
        idx.parse(content, name="the-file")
    assert str(raised.value).startswith("the-file ")


def test_idx_files_make_an_image_set() -> None:
    images = idx.image_set("tiny", TINY, class_names=("zero", "one"))
    for found, expected in (
        (images.train_images, IMAGES),
        (images.train_labels, LABELS),
        (images.test_images, IMAGES[:2]),
        (images.test_labels, LABELS[:2]),
    ):
        np.testing.assert_array_equal(found, expected)
    assert (images.train_images.dtype, images.train_labels.dtype) == (np.dtype(np.uint8), np.dtype(np.int64))


# The registry


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(DataError, match=r"no data set 'mnits'; there are aesop, .* Did you mean 'mnist'\?"):
        datasets.load("mnits")


def test_import_is_light() -> None:
    # What `dualform` itself imports is not this test's concern: count what the import adds.
    script = (
        "import sys, dualform; before = set(sys.modules); import dualform.experiments.datasets; "
        "heavy = {'numpy', 'torch', 'sklearn', 'rich', 'PIL', 'platformdirs'}; "
        "print(sorted(heavy & (set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# The image sets


def test_digits_are_split_the_same_way_every_time() -> None:
    one, two = datasets.load("digits"), datasets.load("digits")
    np.testing.assert_array_equal(one.test_images, two.test_images)
    assert (one.train_images.shape, one.test_images.shape) == ((1437, 8, 8), (360, 8, 8))
    assert (one.train_images.dtype, one.train_images.max()) == (np.dtype(np.uint8), 16)
    assert one.train_labels.dtype == np.int64
    # The split itself: were it to change, so would every result on digits.
    assert one.test_labels[:12].tolist() == [9, 2, 5, 7, 6, 9, 7, 3, 3, 3, 4, 6]
    share = np.bincount(one.test_labels) / np.bincount(np.concatenate([one.train_labels, one.test_labels]))
    np.testing.assert_allclose(share, 0.2, atol=0.01)


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"inside sklearn, which is not installed: pip install 'dualform\[data\]'"):
        datasets.load("digits")


def test_standardised_by_the_training_images() -> None:
    digits = datasets.load("digits")
    train, test = datasets.standardised(digits)
    pixels = torch.from_numpy(digits.train_images).double()
    mean, deviation = pixels.mean(), pixels.std(correction=0)
    for part, images in ((train, digits.train_images), (test, digits.test_images)):
        assert part.dtype == torch.float32
        expected = ((torch.from_numpy(images).double() - mean) / deviation).reshape(-1, 64).float()
        torch.testing.assert_close(part, expected, rtol=1e-6, atol=1e-6)


def test_blank_images_cannot_be_standardised() -> None:
    blank = replace(datasets.load("digits"), train_images=np.full((1437, 8, 8), 3, dtype=np.uint8))
    with pytest.raises(DataError, match="All training pixels of digits are 3"):
        datasets.standardised(blank)


@pytest.mark.parametrize("channels", [(), (3,)])
def test_permuted_moves_pixels_alike_in_all_images(channels: tuple[int, ...]) -> None:
    rng = np.random.RandomState(1)
    train, test = (rng.randint(256, size=(n, 4, 5, *channels)).astype(np.uint8) for n in (6, 3))
    labels = np.zeros(6, dtype=np.int64)
    images = ImageSet("some", train, labels, test, labels[:3], ("zero",))
    other = datasets.permuted(images)
    assert other.name == "some-permuted"
    assert other.train_images.shape == train.shape
    assert other.train_labels is labels
    order = np.random.RandomState(0).permutation(20)
    for part, moved in ((train, other.train_images), (test, other.test_images)):
        np.testing.assert_array_equal(moved.reshape(len(part), 20, -1), part.reshape(len(part), 20, -1)[:, order])
    assert not np.array_equal(datasets.permuted(images, seed=1).train_images, other.train_images)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_labels": np.zeros(2, dtype=np.int64)}, r"labels of shape \(2,\)"),
        ({"train_images": IMAGES.reshape(3, 4)}, r"images of shape \(3, 4\)"),
        ({"train_labels": np.array([0, 1, 2])}, "run from 0 to 2; expected 0 to 1"),
        ({"test_images": np.zeros((2, 2, 3), dtype=np.uint8)}, "expected the same"),
    ],
)
def test_image_set_must_fit_together(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        replace(idx.image_set("tiny", TINY, class_names=("zero", "one")), **changes)


# CIFAR-10


def cifar_members() -> tuple[dict[str, bytes], np.ndarray, np.ndarray]:
    """Return members such as the npm package's, four images a batch, and the pixels and labels in them."""
    image = pytest.importorskip("PIL.Image", reason="needs Pillow, which comes with dualform[figures]")
    rng = np.random.RandomState(0)
    pixels = rng.randint(256, size=(6, 4, 32, 32, 3)).astype(np.uint8)
    labels = rng.randint(10, size=(6, 4))
    members = {
        "train_lables.json": json.dumps(labels[:5].ravel().tolist()).encode(),
        "test_lables.json": json.dumps(labels[5].tolist()).encode(),
    }
    for batch, rows in zip([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"], pixels, strict=True):
        stream = io.BytesIO()
        image.fromarray(rows.reshape(4, 1024, 3)).save(stream, format="PNG")
        members[f"{batch}.png"] = stream.getvalue()
    return members, pixels, labels


def test_cifar10_from_png_to_images() -> None:
    members, pixels, labels = cifar_members()
    contents = cifar10.from_png(members, progress=False)
    first = contents["data_batch_1.bin"]
    assert first[0] == labels[0, 0]
    assert first[1:1025] == pixels[0, 0, :, :, 0].tobytes(), "the red plane comes first"
    images = cifar10.build_cifar10(contents)
    np.testing.assert_array_equal(images.train_images, pixels[:5].reshape(-1, 32, 32, 3))
    np.testing.assert_array_equal(images.test_images, pixels[5])
    np.testing.assert_array_equal(images.train_labels, labels[:5].ravel())
    np.testing.assert_array_equal(images.test_labels, labels[5])


@pytest.mark.parametrize(
    "changes",
    [
        {"train_lables.json": b"[1, 2"},
        {"train_lables.json": b"[1, 2, 3]"},
        {"test_lables.json": b"[1, 2, 3]"},
        {"test_batch.png": b"no picture"},
    ],
)
def test_cifar10_members_that_do_not_fit(changes: dict[str, bytes]) -> None:
    members, _, _ = cifar_members()
    with pytest.raises(SourceError, match=r"the images of \w+\.json cannot be converted"):
        cifar10.from_png({**members, **changes}, progress=False)


def test_cifar10_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    members, _, _ = cifar_members()
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(SourceError, match="Pillow is not installed"):
        cifar10.from_png(members, progress=False)


def test_cifar10_file_with_half_a_record() -> None:
    contents = {file: bytes(3073) for file in catalogue.find_dataset("cifar-10").files}
    with pytest.raises(DataError, match=r"cifar-10/test_batch\.bin has 3072 bytes; expected a multiple of 3073"):
        cifar10.build_cifar10({**contents, "test_batch.bin": bytes(3072)})


# The real sets, where this machine has them


def need(name: str) -> ImageSet:
    if sources.find(catalogue.find_dataset(name)) is None:
        files = ", ".join(f"{file}[.gz]" for file in catalogue.find_dataset(name).files)
        pytest.skip(f"needs {name}: set DUALFORM_DATA to a folder that holds {name}/ with {files}")
    return datasets.load(name, progress=False)


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "mean", "deviation", "first"),
    [("mnist", 0.1307, 0.3081, [5, 0, 4, 1, 9]), ("fashion-mnist", 0.2860, 0.3530, [9, 0, 0, 3, 0])],
)
def test_real_idx_sets(name: str, mean: float, deviation: float, first: list[int]) -> None:
    images = need(name)
    assert (images.train_images.shape, images.test_images.shape) == ((60_000, 28, 28), (10_000, 28, 28))
    assert images.train_labels[:5].tolist() == first
    assert np.bincount(images.test_labels).sum() == 10_000
    train, _ = datasets.standardised(images)
    black, white = float(train.min()), float(train.max())  # -mean/deviation, (1 - mean)/deviation
    assert 1 / (white - black) == pytest.approx(deviation, abs=5e-5)
    assert -black / (white - black) == pytest.approx(mean, abs=5e-5)


@pytest.mark.data
def test_real_cifar10() -> None:
    images = need("cifar-10")
    assert images.train_images.shape == (50_000, 32, 32, 3)
    assert np.bincount(images.train_labels).tolist() == [5000] * 10
    assert np.bincount(images.test_labels).tolist() == [1000] * 10
    published = [
        125.306918046875,
        122.950394140625,
        113.86538318359375,
    ]  # mean of each channel, all 50,000 images
    assert images.train_images.mean(axis=(0, 1, 2), dtype=np.float64).tolist() == pytest.approx(published, rel=1e-12)
