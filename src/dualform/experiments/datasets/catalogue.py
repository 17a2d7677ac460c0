"""The description of a data set, and the registry of data sets.

Does not read or fetch anything: `sources` does, by what is said here.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from dualform.errors import DataError

if TYPE_CHECKING:
    from dualform.experiments.datasets.imageset import ImageSet
    from dualform.experiments.datasets.textset import TextSet

Build = Callable[[Mapping[str, bytes]], "ImageSet | TextSet"]
"""Makes the images, or the text, from the verified, uncompressed content of the files, by file name."""
BuildT = TypeVar("BuildT", bound=Build)


class Remote(Protocol):
    """A place elsewhere that a data set's files can be fetched from."""

    @property
    def label(self) -> str:
        """The name of the place in messages."""

    def fetch(self, files: Collection[str], *, progress: bool) -> dict[str, bytes]:
        """Return the uncompressed content of the files, or raise `SourceError` with the reason."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """A data set: its files, where to fetch them, and how to make images or a text of them.

    Attributes:
        name: its name, and that of the folder its files are kept in.
        summary: one sentence on what it holds.
        licence: the terms it comes under.
        build: makes the images, or the text, from the files' content.
        files: the sha256 of each file's uncompressed content, by file name.
        remotes: where the files can be fetched, in the order to be tried.
        module: the importable module that carries the set, where there are no files.
    """

    name: str
    summary: str
    licence: str
    build: Build
    files: Mapping[str, str]
    remotes: tuple[Remote, ...]
    module: str | None


_DATASETS: dict[str, Dataset] = {}


def provides(
    name: str,
    *,
    licence: str,
    files: Mapping[str, str] | None = None,
    remotes: tuple[Remote, ...] = (),
    module: str | None = None,
) -> Callable[[BuildT], BuildT]:
    """Register a function as the one that builds a data set; its docstring's first line is the summary."""

    def register(build: BuildT) -> BuildT:
        summary = (build.__doc__ or "").partition("\n")[0]
        _DATASETS[name] = Dataset(
            name=name,
            summary=summary,
            licence=licence,
            build=build,
            files=files or {},
            remotes=remotes,
            module=module,
        )
        return build

    return register


def names() -> tuple[str, ...]:
    """Return the names of the data sets.

    >>> from dualform.experiments import datasets
    >>> datasets.names()
    ('aesop', 'cifar-10', 'digits', 'fashion-mnist', 'mnist', 'moby-dick', 'standard-library', 'wikitext-2')
    """
    return tuple(sorted(_DATASETS))


def find_dataset(name: str) -> Dataset:
    """Return the data set of this name."""
    dataset = _DATASETS.get(name)
    if dataset is None:
        close = difflib.get_close_matches(name, names(), n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise DataError(f"There is no data set {name!r}; there are {', '.join(names())}.{hint}")
    return dataset
