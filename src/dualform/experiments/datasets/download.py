"""Public downloads over HTTP: one address for each file, or one archive (or one book) with all of them.

Everything is held in memory until it is complete, so a download that breaks off leaves nothing behind. Does
not write or verify anything.
"""

import http.client
import io
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass

from dualform.experiments.datasets.contents import SourceError, cut_book, gunzip, read_members, read_zip
from dualform.progress import bar

SILENCE_SECONDS = 30.0
"""Seconds without new bytes after which a download counts as failed."""

_CHUNK = 1 << 18


@dataclass(frozen=True, slots=True)
class Download(ABC):
    """Something that can be downloaded from an address and holds the files of a data set."""

    url: str

    @property
    def label(self) -> str:
        """The address."""
        return f"download {self.url}"

    @abstractmethod
    def fetch(self, files: Collection[str], *, progress: bool) -> dict[str, bytes]:
        """Return the content of every file."""


class FileDownload(Download):
    """Files that lie side by side under one address, each as `.gz`."""

    def fetch(self, files: Collection[str], *, progress: bool) -> dict[str, bytes]:
        """Download and uncompress every file."""
        return {file: gunzip(download(f"{self.url}{file}.gz", progress=progress), name=f"{file}.gz") for file in files}


class ArchiveDownload(Download):
    """A tar archive, compressed or not, that holds all the files."""

    def fetch(self, files: Collection[str], *, progress: bool) -> dict[str, bytes]:
        """Download the archive and read the files out of it."""
        return read_members(io.BytesIO(download(self.url, progress=progress)), files)


class ZipDownload(Download):
    """A zip archive that holds all the files."""

    def fetch(self, files: Collection[str], *, progress: bool) -> dict[str, bytes]:
        """Download the archive and read the files out of it."""
        return read_zip(download(self.url, progress=progress), files)


@dataclass(frozen=True, slots=True)
class BookDownload(Download):
    """A book of Project Gutenberg as one text file, from its first words to the mark before the licence.

    Attributes:
        url: the address.
        first: what the file starts with once the header is left out.
    """

    first: str

    def fetch(self, files: Collection[str], *, progress: bool) -> dict[str, bytes]:
        """Download the book and cut the header and the licence off."""
        book = cut_book(download(self.url, progress=progress), first=self.first, name=self.url.rpartition("/")[2])
        return dict.fromkeys(files, book)


def download(url: str, *, progress: bool) -> bytes:
    """Return the complete content of an address, or raise `SourceError` with the reason."""
    name = url.rpartition("/")[2]
    request = urllib.request.Request(url, headers={"User-Agent": "dualform"})
    received = io.BytesIO()
    try:
        with urllib.request.urlopen(request, timeout=SILENCE_SECONDS) as response:
            length = response.headers.get("Content-Length")
            total = int(length) if length else None
            with bar(name, total=total, unit="bytes", show=progress) as advance:
                while chunk := response.read(_CHUNK):
                    received.write(chunk)
                    advance(len(chunk))
    except urllib.error.HTTPError as error:
        with error:
            raise SourceError(f"{name}: HTTP {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise SourceError(f"{name}: {error.reason}") from error
    except (http.client.HTTPException, OSError, ValueError) as error:
        raise SourceError(f"{name}: {str(error) or type(error).__name__}") from error
    if total is not None and received.tell() != total:
        raise SourceError(f"{name} broke off after {received.tell()} of {total} bytes")
    return received.getvalue()
