"""A run in memory: for tests, and for short runs that nobody opens again."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dualform.store.blobs import (
    Blobs,
    ByteSpan,
    FileEntry,
    Tag,
    Write,
    changed_error,
    content_entry,
    content_parts,
    content_tag,
    written_content,
)


class MemoryBlobs(Blobs):
    """Blobs that live as long as this object.

    blobs = MemoryBlobs()
    with dualform.record(model, optimizer, blobs): ...
    memory = dualform.open(blobs)
    """

    def __init__(self, location: str = "memory") -> None:
        self._location = location
        self._contents: dict[str, bytes] = {}
        self._prefix = ""  # of all names, in a place within another one
        self._lock = threading.Lock()
        self._holder: object | None = None  # stands for whoever has the lease

    @property
    def location(self) -> str:
        """The name that was given to it."""
        return self._location

    def load(self, name: str) -> tuple[bytes, Tag]:
        """Return the content of a blob, and its tag."""
        content = self._content(name)
        return content, content_tag(content)

    def size(self, name: str) -> int | None:
        """Return how many bytes a blob has; None where there is none of that name."""
        content = self._contents.get(self._prefix + name)
        return None if content is None else len(content)

    def ranges(self, name: str, spans: Sequence[ByteSpan]) -> Sequence[memoryview]:
        """Return parts of a blob, without copying them."""
        return content_parts(self._content(name), spans)

    def publish(self, name: str, write: Write) -> FileEntry:
        """Let `write` make the content of a blob, and publish it."""
        content = written_content(write)
        self._contents[self._prefix + name] = content
        return content_entry(content)

    def replace(self, name: str, content: bytes, *, was: Tag | None) -> Tag:
        """Replace a blob if its content is still the one of the tag `was`."""
        with self._lock:
            now = self._contents.get(self._prefix + name)
            if (None if now is None else content_tag(now)) != was:
                raise changed_error(self, name)
            self._contents[self._prefix + name] = bytes(content)
        return content_tag(content)

    def list(self, prefix: str = "") -> Sequence[str]:
        """Return the names of the blobs that begin with a prefix."""
        mine = [name for name in tuple(self._contents) if name.startswith(self._prefix + prefix)]
        return [name.removeprefix(self._prefix) for name in mine]

    def remove(self, name: str) -> None:
        """Remove a blob."""
        self._contents.pop(self._prefix + name, None)

    def within(self, folder: str) -> "MemoryBlobs":
        """Return a folder of this place as a place of its own; both see the same blobs."""
        found = MemoryBlobs(f"{self._location}/{folder}")
        found._contents, found._prefix = self._contents, f"{self._prefix}{folder}/"
        return found

    @contextmanager
    def lease(self) -> Iterator[bool]:
        """Be the only one who writes; gives whether that could be had."""
        me = object()
        with self._lock:
            if self._holder is None:
                self._holder = me
        try:
            yield self._holder is me
        finally:
            with self._lock:
                if self._holder is me:
                    self._holder = None

    def _content(self, name: str) -> bytes:
        try:
            return self._contents[self._prefix + name]
        except KeyError:
            raise FileNotFoundError(2, "No such blob", f"{self.location}/{name}") from None
