"""The data sets of the experiments, by name.

One data set a file, registered by `@provides` and imported here. `load` gives the images and `load_text` the text,
wherever they are from; `fetch` only sees to it that this machine has them; `describe_datasets` lists them all. The
places that files come from stand in `sources`. Importing this package is cheap: numpy, torch and scikit-learn are
imported where they are used.
"""

from dataclasses import dataclass

from dualform.errors import DataError
from dualform.experiments.datasets import (  # noqa: F401 (an import registers the set)
    aesop,
    cifar10,
    digits,
    fashion_mnist,
    mnist,
    moby_dick,
    sources,
    standard_library,
    wikitext2,
)
from dualform.experiments.datasets.catalogue import find_dataset, names
from dualform.experiments.datasets.imageset import ImageSet, moments, permuted, standardised
from dualform.experiments.datasets.sources import Location
from dualform.experiments.datasets.textset import TextSet

__all__ = [
    "Description",
    "ImageSet",
    "Location",
    "TextSet",
    "describe_datasets",
    "fetch",
    "load",
    "load_text",
    "moments",
    "names",
    "permuted",
    "standardised",
]


@dataclass(frozen=True, slots=True)
class Description:
    """One row of the list of data sets.

    Attributes:
        name: what `load` and `fetch` call it.
        summary: what it holds.
        licence: the terms it comes under.
        files: the files it consists of; empty where it comes inside a Python package.
        location: where this machine has it; None where it has to be fetched.
    """

    name: str
    summary: str
    licence: str
    files: tuple[str, ...]
    location: Location | None

    @property
    def available(self) -> bool:
        """Whether this machine has it."""
        return self.location is not None


def describe_datasets() -> tuple[Description, ...]:
    """Describe every data set, and say where this machine has it.

    Only looks whether the files are there; their checksums are verified by `fetch` and `load`.

    >>> [row.name for row in describe_datasets()]
    ['aesop', 'cifar-10', 'digits', 'fashion-mnist', 'mnist', 'moby-dick', 'standard-library', 'wikitext-2']
    """
    return tuple(
        Description(
            name=dataset.name,
            summary=dataset.summary,
            licence=dataset.licence,
            files=tuple(dataset.files),
            location=sources.find(dataset),
        )
        for dataset in map(find_dataset, names())
    )


def fetch(name: str, *, progress: bool = True) -> Location:
    """Make sure that this machine has a data set, and return where.

    Every file is verified against its checksum. Does nothing more where a local copy is sound.

    Args:
        name: one of `names()`.
        progress: show progress bars on stderr, if that is a terminal.

    Raises:
        DataError: there is no such set, no source has it, or the cache folder cannot be written.
    """
    return sources.obtain(find_dataset(name), progress=progress).location


def load(name: str, *, progress: bool = True) -> ImageSet:
    """Load an image set, fetching it first where this machine does not have it.

    >>> load("digits").train_images.shape
    (1437, 8, 8)

    Args:
        name: one of `names()`.
        progress: show progress bars on stderr, if that is a terminal.

    Raises:
        DataError: there is no such set, no source has it, or its content is not what it should be.
    """
    found = _build(name, progress=progress)
    if not isinstance(found, ImageSet):
        raise DataError(f"{name} is a text; expected a set of images. Texts are loaded by load_text.")
    return found


def load_text(name: str, *, progress: bool = True) -> TextSet:
    """Load a text, fetching it first where this machine does not have it. Otherwise as `load`."""
    found = _build(name, progress=progress)
    if not isinstance(found, TextSet):
        raise DataError(f"{name} is a set of images; expected a text. Images are loaded by load.")
    return found


def _build(name: str, *, progress: bool) -> ImageSet | TextSet:
    dataset = find_dataset(name)
    return dataset.build(sources.obtain(dataset, progress=progress).contents)
