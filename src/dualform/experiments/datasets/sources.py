"""The source chain: where a data set's files come from.

Tried in order, until one gives every file with the right checksum: the folders in `DUALFORM_DATA`, the cache
folder, a system copy, and then the data set's own remotes, that is, public downloads and package registries.
A local folder is used in place; what a remote gives is written to the cache. Does not make images.
"""

import importlib.util
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dualform.errors import DataError
from dualform.experiments.datasets import dataset_cache
from dualform.experiments.datasets.catalogue import Dataset, Remote
from dualform.experiments.datasets.contents import SourceError, read_verified, verify_checksum

SYSTEM_FOLDER = Path("/usr/share/datasets")
"""Where Linux distributions put packaged data sets, a folder each."""


@dataclass(frozen=True, slots=True)
class Location:
    """Where this machine has a data set.

    Attributes:
        source: the source it came from.
        folder: the folder that holds its files; None where it comes inside a Python package.
    """

    source: str
    folder: Path | None

    def __str__(self) -> str:
        return self.source if self.folder is None else f"{self.folder} ({self.source})"


@dataclass(frozen=True, slots=True)
class Obtained:
    """A data set's files: where they are, and their verified, uncompressed content by name."""

    location: Location
    contents: Mapping[str, bytes]


def find(dataset: Dataset) -> Location | None:
    """Return the first local folder that has files of all the names, or None; checksums are not compared."""
    if dataset.module is not None:
        installed = importlib.util.find_spec(dataset.module) is not None
        return Location(source=f"inside {dataset.module}", folder=None) if installed else None
    for source, folder in _local_folders(dataset.name):
        if all(_exists(folder / file) or _exists(folder / f"{file}.gz") for file in dataset.files):
            return Location(source=source, folder=folder)
    return None


def obtain(dataset: Dataset, *, progress: bool) -> Obtained:
    """Return a data set's files from the first source that has them whole, fetching them where none is local.

    Raises:
        DataError: no source has the files (the message lists every source and why), or they cannot be kept.
    """
    if dataset.module is not None:
        return Obtained(location=_inside_module(dataset, dataset.module), contents={})

    failures: list[str] = []
    if not _named_folders():
        failures.append("folders in DUALFORM_DATA: the variable is not set")
    for source, folder in _local_folders(dataset.name):
        try:
            contents = {file: read_verified(folder, file, sha256=sha256) for file, sha256 in dataset.files.items()}
        except SourceError as error:
            failures.append(f"{source} {folder}: {error}")
        else:
            return Obtained(location=Location(source=source, folder=folder), contents=contents)

    try:
        target = _writable_cache() / dataset.name
    except SourceError as error:
        raise _all_failed(dataset, f"is in no local source, and cannot be fetched: {error}", failures) from error

    for remote in dataset.remotes:
        try:
            contents = _fetch(dataset, remote, progress=progress)
        except (SourceError, OSError) as error:
            failures.append(f"{remote.label}: {error}")
            continue
        try:
            dataset_cache.write(target, contents)
        except OSError as error:
            raise DataError(
                f"{dataset.name} was fetched ({remote.label}), but the cache folder {target} cannot be "
                f"written ({error}). Make room, or set DUALFORM_CACHE to another folder."
            ) from error
        return Obtained(location=Location(source=remote.label, folder=target), contents=contents)

    raise _all_failed(dataset, "cannot be had from any of its sources", failures)


def _named_folders() -> list[Path]:
    named = os.environ.get("DUALFORM_DATA", "").split(os.pathsep)
    return [Path(folder).expanduser() for folder in named if folder]


def _local_folders(name: str) -> Iterator[tuple[str, Path]]:
    """Yield the local sources in order, each with the folder it keeps this set in."""
    for folder in _named_folders():
        yield "folder in DUALFORM_DATA", folder / name
    cached = dataset_cache.cache_folder()
    if cached is not None:
        yield "cache folder", cached / name
    yield "system copy", SYSTEM_FOLDER / name


def _exists(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a folder that may not be looked into has nothing to give
        return False


def _inside_module(dataset: Dataset, module: str) -> Location:
    location = find(dataset)
    if location is None:
        raise DataError(f"{dataset.name} comes inside {module}, which is not installed: pip install 'dualform[data]'.")
    return location


def _fetch(dataset: Dataset, remote: Remote, *, progress: bool) -> dict[str, bytes]:
    fetched = remote.fetch(dataset.files, progress=progress)
    return {file: verify_checksum(fetched[file], sha256=sha256, name=file) for file, sha256 in dataset.files.items()}


def _writable_cache() -> Path:
    """Return the cache folder, having made sure, before anything is fetched, that it can be written."""
    folder = dataset_cache.cache_folder()
    if folder is None:
        raise SourceError(
            "the platform's cache folder is not known without platformdirs; pip install 'dualform[data]', or "
            "set DUALFORM_CACHE to a folder"
        )
    try:
        dataset_cache.check_writable(folder)
    except OSError as error:
        raise SourceError(
            f"the cache folder {folder} cannot be written ({error}); set DUALFORM_CACHE to a folder that can"
        ) from error
    return folder


def _all_failed(dataset: Dataset, what: str, failures: list[str]) -> DataError:
    """Return the one error that says what failed, in every source, and what to do."""
    listed = "\n".join(f"  - {failure}" for failure in failures)
    return DataError(
        f"{dataset.name} {what}\n{listed}\n"
        f"To use a copy of your own, put {', '.join(dataset.files)} (plain or as .gz) into "
        f"FOLDER/{dataset.name} and set DUALFORM_DATA=FOLDER."
    )
