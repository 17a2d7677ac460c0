"""Bytes by name, the storage of a run: a folder, memory, or an object storage service.

A run is a set of blobs that are published whole or not at all and never change, and one blob that is replaced: the
manifest, which lists the others. To keep runs elsewhere, derive from `Blobs` and implement its abstract methods, and
derive a test from `BlobsConformance` in `tests/conformance`. What the blobs hold is decided elsewhere.
"""

import dataclasses
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, Protocol

import msgspec
import xxhash

from dualform.engine.description import Count
from dualform.errors import StoreError

Checksum = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
"""An xxh3 checksum, 64 bits, as hexadecimal."""
Tag = str
"""Names the content of a blob: two contents have the same tag only if they are equal."""
ByteSpan = tuple[int, int]
"""Offset of the first byte, and number of bytes."""
Write = Callable[[BinaryIO], object]
"""Writes the content of a blob to a file that is open for writing, from its first byte to its last."""
READ_BYTES = 4 << 20  # bytes that are read at once where a whole blob is summed


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A published blob: its size, its xxh3 checksum, and its name, if not the one that the manifest lists it by."""

    bytes: Count
    xxh3: Checksum
    at: str = ""


class Staged(Protocol):
    """A blob that is written and not published yet."""

    @property
    def xxh3(self) -> str:
        """The checksum of its content."""

    def publish(self, name: str | None = None) -> FileEntry:
        """Let it appear under the name that it was staged for, or under another one."""

    def discard(self) -> None:
        """Remove the written content; the blob is not published."""


class Blobs(ABC):
    """Where one run is kept. Names are relative, with slashes: "shards/000000.safetensors".

    Everything that fails raises an `OSError`; a blob that is not there is a `FileNotFoundError`. Any number of threads
    may read.
    """

    @property
    @abstractmethod
    def location(self) -> str:
        """The place as messages call it, for example the path of a folder."""

    @abstractmethod
    def load(self, name: str) -> tuple[bytes, Tag]:
        """Return the content of a blob, and the tag of that content."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Return how many bytes a blob has; None where there is none of that name."""

    @abstractmethod
    def ranges(self, name: str, spans: Sequence[ByteSpan]) -> Sequence[memoryview]:
        """Return parts of a blob; raise `OSError` where it ends too early."""

    @abstractmethod
    def publish(self, name: str, write: Write) -> FileEntry:
        """Let `write` make the content of a blob, and publish it: readers see all of it or nothing, whatever happens.

        A blob of the same name is replaced.
        """

    @abstractmethod
    def replace(self, name: str, content: bytes, *, was: Tag | None) -> Tag:
        """Replace a blob if its content is still the one of the tag `was`; return the new tag.

        With None the blob must not be there yet. Otherwise `StoreError`: somebody else has replaced it.
        """

    @abstractmethod
    def list(self, prefix: str = "") -> Sequence[str]:
        """Return the names of the published blobs that begin with a prefix."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a blob; does nothing where there is none."""

    @abstractmethod
    def lease(self) -> AbstractContextManager[bool]:
        """Be the only one who writes, for as long as the context lasts; it gives whether that could be had.

        The lease of a process that is killed ends with it.
        """

    # What a place may do better, or has no need of ----------------------------------------------------------------

    def within(self, folder: str) -> "Blobs":
        """Return a folder of this place as a place of its own, for the files of one of several processes.

        A blob `name` of it is the blob `folder/name` here. It has a lease of its own.
        """
        raise StoreError(
            f"{self.location} cannot hold a run of several processes. Record to a folder, or to an address."
        )

    def identity(self) -> Hashable:
        """Return a value that two objects have in common if they are the same place."""
        return id(self)

    def exists(self) -> bool:
        """Say whether the place exists, with or without a run in it."""
        return True

    def make_ready(self) -> None:  # noqa: B027 (nothing to make is the common case)
        """Make the place before a run is recorded to it; raise `RunExistsError` where it holds anything but a run."""

    def sizes(self, names: Sequence[str]) -> Mapping[str, int | None]:
        """Return how many bytes each of many blobs has; None for those that are not there."""
        return {name: self.size(name) for name in names}

    def stage(self, name: str, write: Write) -> Staged:
        """Let `write` make the content of a blob now, to be published later; here it waits in memory."""
        return _StagedInMemory(self, name, written_content(write))

    def open(self, name: str) -> BinaryIO:
        """Return a blob as a file that is open for reading."""
        return io.BufferedReader(_RangeFile(self, name))

    def stamp(self, name: str) -> Hashable | None:
        """Return a value that changes whenever a blob is replaced, fast to come by; None where there is no blob."""
        try:
            return self.load(name)[1]
        except FileNotFoundError:
            return None

    def local_path(self, name: str) -> Path | None:
        """Return the path of a blob that is a file on this machine, so that it can be mapped; None for other blobs."""
        return None

    def free_bytes(self) -> int | None:
        """Return how many bytes more can be published; None where nobody knows."""
        return None

    def remove_unpublished(self, prefix: str = "", *, older_than_seconds: float = 0.0) -> None:  # noqa: B027
        """Remove the unpublished content that killed writers left for names with a prefix."""

    def mark_used(self, name: str) -> None:  # noqa: B027
        """Note that a blob was used now, for `by_use`."""

    def by_use(self, prefix: str) -> Sequence[tuple[str, int]]:
        """Return the names and sizes of the blobs with a prefix: the last used first, where the order is known."""
        return [(name, self.size(name) or 0) for name in self.list(prefix)]


@dataclass(frozen=True, slots=True)
class Blob:
    """One blob of a place, which need not be there."""

    blobs: Blobs
    name: str

    def __str__(self) -> str:
        return f"{self.blobs.location}/{self.name}"

    def load(self) -> bytes:
        """Return the content."""
        return self.blobs.load(self.name)[0]

    def size(self) -> int:
        """Return the number of bytes; raise `FileNotFoundError` where the blob is not there."""
        found = self.blobs.size(self.name)
        if found is None:
            raise FileNotFoundError(2, "No such file", str(self))
        return found

    def ranges(self, spans: Sequence[ByteSpan]) -> Sequence[memoryview]:
        """Return parts of the content."""
        return self.blobs.ranges(self.name, spans)

    def open(self) -> BinaryIO:
        """Return the blob as a file that is open for reading."""
        return self.blobs.open(self.name)

    def local_path(self) -> Path | None:
        """Return the path of the blob if it is a file on this machine, else None."""
        return self.blobs.local_path(self.name)

    def checksum(self) -> str:
        """Return the xxh3 checksum of the content, as hexadecimal."""
        digest = xxhash.xxh3_64()
        with self.open() as file:
            while block := file.read(READ_BYTES):
                digest.update(block)
        return digest.hexdigest()


def written_content(write: Write) -> bytes:
    """Return the content that `write` writes."""
    buffer = io.BytesIO()
    write(buffer)
    return buffer.getvalue()


def content_parts(content: bytes, spans: Sequence[ByteSpan]) -> list[memoryview]:
    """Return parts of a content without copying them; raise `OSError` where it ends too early."""
    if any(offset + count > len(content) for offset, count in spans):
        raise OSError(f"its content of {len(content)} bytes ends too early")
    return [memoryview(content)[offset : offset + count] for offset, count in spans]


def content_tag(content: bytes) -> Tag:
    """Return the tag of a content."""
    return xxhash.xxh3_128_hexdigest(content)


def content_entry(content: bytes) -> FileEntry:
    """Return the entry of a blob that has this content."""
    return FileEntry(len(content), xxhash.xxh3_64_hexdigest(content))


def changed_error(blobs: Blobs, name: str) -> StoreError:
    """Return the error of a `replace` that came too late."""
    return StoreError(
        f"{Blob(blobs, name)} is not as this program left it: somebody else writes to {blobs.location} at the same "
        "time. Let one program write at a time, and open the run again."
    )


def publish_by_content(blobs: Blobs, name: str, write: Write) -> FileEntry:
    """Publish a blob that may stand for another one of its name: under a name of its own, after its content.

    What the manifest lists stays as it is until the manifest lists the new blob instead.
    """
    staged = blobs.stage(name, write)
    stem, dot, suffix = name.rpartition(".")
    at = f"{stem}-{staged.xxh3}{dot}{suffix}"
    return dataclasses.replace(staged.publish(at), at=at)


@dataclass(frozen=True, slots=True)
class _StagedInMemory:
    """The content of a blob, which waits in memory to be published."""

    blobs: Blobs
    name: str
    content: bytes

    @property
    def xxh3(self) -> str:
        return xxhash.xxh3_64_hexdigest(self.content)

    def publish(self, name: str | None = None) -> FileEntry:
        return self.blobs.publish(self.name if name is None else name, lambda file: file.write(self.content))

    def discard(self) -> None:
        """Do nothing: the content was never anywhere but in memory."""


class _RangeFile(io.RawIOBase):
    """A blob as a file that is read by ranges."""

    def __init__(self, blobs: Blobs, name: str) -> None:
        self._blob = Blob(blobs, name)
        self._size = self._blob.size()
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = max(0, min(len(buffer), self._size - self._at))
        if count:
            buffer[:count] = self._blob.ranges([(self._at, count)])[0]
        self._at += count
        return count
