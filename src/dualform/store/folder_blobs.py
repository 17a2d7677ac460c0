"""A run in a folder of a file system: a blob is a file.

A file is written beside its place and renamed, so that it appears whole or not at all; it is on the disk before it
appears, and its folder after. No link below the folder is followed for writing or removing: a run folder may come from
somebody else, or lie on a disk that others write to. `folder.py` says which names are ours.
"""

import contextlib
import errno
import os
import shutil
import stat
import time
import uuid
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from dualform.errors import RunExistsError, StoreError
from dualform.store.blobs import Blobs, ByteSpan, FileEntry, Tag, Write, changed_error, content_tag
from dualform.store.folder import (
    FOLDERS,
    PARTIAL,
    TOP_NAMES,
    check_no_link,
    is_foreign,
    own_files,
    partial_files,
    remove_folder,
)
from dualform.store.format import LOCK
from dualform.store.summed_file import SummedFile


class FolderBlobs(Blobs):
    """The files of one run folder."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def __reduce__(self) -> tuple[Any, ...]:
        return FolderBlobs, (str(self.folder.resolve()),)  # another process may work in another folder

    @property
    def location(self) -> str:
        """The path of the folder."""
        return str(self.folder)

    def load(self, name: str) -> tuple[bytes, Tag]:
        """Return the content of a file, and its tag."""
        with self.open(name) as file:
            content = file.read()
        return content, content_tag(content)

    def size(self, name: str) -> int | None:
        """Return how many bytes a file has; None where there is none of that name."""
        found = self._status(name)
        return None if found is None else found.st_size

    def ranges(self, name: str, spans: Sequence[ByteSpan]) -> Sequence[memoryview]:
        """Return parts of a file."""
        found = []
        with self.open(name) as file:
            for offset, count in spans:
                file.seek(offset)
                content = file.read(count)
                if len(content) != count:
                    raise OSError(f"{self.folder}/{name} ends too early")
                found.append(memoryview(content))
        return found

    def publish(self, name: str, write: Write) -> FileEntry:
        """Let `write` fill a file, and publish it: a reader sees the whole file or none, even after a kill."""
        return self.stage(name, write).publish()

    def stage(self, name: str, write: Write) -> "_StagedFile":
        """Let `write` fill a file beside its place, to be renamed later."""
        path = self.folder / name
        check_no_link(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{PARTIAL}{uuid.uuid4().hex}")
        try:
            with partial.open("xb", buffering=0) as raw:
                file = SummedFile(raw, direct=True)
                write(file)  # type: ignore[arg-type]
                file.finish()
            return _StagedFile(self.folder, name, partial, file.count, file.digest.hexdigest())
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise

    def replace(self, name: str, content: bytes, *, was: Tag | None) -> Tag:
        """Replace a file if its content is still the one of the tag `was`."""
        staged = self.stage(name, lambda file: file.write(content))
        try:
            with self._unchanged(name, was):
                staged.publish()
        finally:
            staged.discard()
        return content_tag(content)

    def list(self, prefix: str = "") -> Sequence[str]:
        """Return the names of our own files that begin with a prefix; none that is a link or lies behind one."""
        kinds = [kind for kind in FOLDERS if f"{kind}/".startswith(prefix) or prefix.startswith(f"{kind}/")]
        names = [path.relative_to(self.folder).as_posix() for path in own_files(self.folder, kinds)]
        top = [name for name in sorted(TOP_NAMES) if name.startswith(prefix) and self._status(name) is not None]
        return top + [name for name in names if name.startswith(prefix)]

    def remove(self, name: str) -> None:
        """Remove a file; does nothing where there is none."""
        path = self.folder / name
        check_no_link(path)
        path.unlink(missing_ok=True)

    @contextmanager
    def lease(self) -> Iterator[bool]:
        """Hold the folder's lock; gives whether it could be had. Released by the system if we are killed.

        Only the process that took it releases it: a forked one leaves it alone.
        """
        import fcntl

        path, process = self.folder / LOCK, os.getpid()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        _locks.add(descriptor)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            # Who held it before may have removed the file that we opened; a lock on nothing protects nothing.
            if not _is_open_at(path, descriptor):
                yield False
                return
            try:
                yield True
            finally:
                if os.getpid() == process and _is_open_at(path, descriptor):  # and not somebody else's by now
                    path.unlink(missing_ok=True)
        finally:
            if os.getpid() == process:
                _locks.discard(descriptor)
                os.close(descriptor)

    def within(self, folder: str) -> "FolderBlobs":
        """Return a folder below this one as a place of its own; raise where a link leads there."""
        path = self.folder / folder
        for place in (path, *path.parents):
            if place == self.folder:
                break
            if place.is_symlink():
                raise StoreError(
                    f"{place} is a link, and none is followed inside of a run. Put the folder itself there."
                )
        return FolderBlobs(path)

    def identity(self) -> Hashable:
        """Return the folder's path without links."""
        return self.folder.resolve()

    def exists(self) -> bool:
        """Say whether the folder is there."""
        return self.folder.is_dir()

    def make_ready(self) -> None:
        """Make the folder; raise where it holds anything but a run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if is_foreign(self.folder):
            raise RunExistsError(f"{self.folder} is not empty and holds no run. Choose a new folder.")

    def open(self, name: str) -> BinaryIO:
        """Open a plain file for reading; anything else, such as a pipe that would have to be waited for, is refused."""
        path = self.folder / name
        if self._status(name) is None and path.exists():
            raise OSError(errno.EINVAL, "Not a file", str(path))
        return path.open("rb")

    def stamp(self, name: str) -> Hashable | None:
        """Return inode, time and size of a file, which change whenever it is replaced."""
        found = self._status(name)
        return None if found is None else (found.st_ino, found.st_mtime_ns, found.st_size)

    def local_path(self, name: str) -> Path:
        """Return the path of a file."""
        return self.folder / name

    def free_bytes(self) -> int:
        """Return how many bytes are free on the disk."""
        return shutil.disk_usage(self.folder).free

    def remove_unpublished(self, prefix: str = "", *, older_than_seconds: float = 0.0) -> None:
        """Remove partial files that killed writers left; with an age, only partial files that are older."""
        limit = time.time() - older_than_seconds if older_than_seconds else None
        for path in partial_files(self.folder, [kind for kind in FOLDERS if f"{kind}/".startswith(prefix)]):
            if not path.relative_to(self.folder).as_posix().startswith(prefix):
                continue
            with contextlib.suppress(OSError):  # another process may remove it at the same time
                if limit is None or path.stat().st_mtime < limit:
                    if path.is_dir():
                        remove_folder(path)
                    else:
                        path.unlink()

    def mark_used(self, name: str) -> None:
        """Set the time of a file to now."""
        with contextlib.suppress(OSError):
            os.utime(self.folder / name)

    def by_use(self, prefix: str) -> Sequence[tuple[str, int]]:
        """Return the names and sizes of the files with a prefix, the one that was used last first."""
        found = [(status, name) for name in self.list(prefix) if (status := self._status(name)) is not None]
        found.sort(key=lambda each: -each[0].st_mtime_ns)
        return [(name, status.st_size) for status, name in found]

    def _status(self, name: str) -> os.stat_result | None:
        """Return the status of a plain file; None where there is no plain file of that name."""
        try:
            # A Path for each of thousands of files takes longer than the look.
            found = os.stat(f"{self.folder}/{name}")  # noqa: PTH116
        except OSError:
            return None
        return found if stat.S_ISREG(found.st_mode) else None

    @contextmanager
    def _unchanged(self, name: str, was: Tag | None) -> Iterator[None]:
        """Raise unless a file has the content of a tag; while the context lasts, nobody else passes this check."""
        import fcntl

        path = self.folder / name
        if was is None:
            if path.exists():
                raise changed_error(self, name)
            yield
            return
        try:
            # For writing too: a network disk locks a file exclusively for nobody else.
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise changed_error(self, name) from None
        _locks.add(descriptor)
        process = os.getpid()
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise changed_error(self, name) from None
            tag = self.load(name)[1]
            if tag != was or not _is_open_at(path, descriptor):
                raise changed_error(self, name)
            yield
        finally:
            if os.getpid() == process:
                _locks.discard(descriptor)
                os.close(descriptor)


@dataclass(slots=True)
class _StagedFile:
    """A file that is written, beside its place, and not published yet."""

    folder: Path
    name: str
    partial: Path
    bytes: int
    xxh3: str

    def publish(self, name: str | None = None) -> FileEntry:
        """Fsync it, rename it to its place or to another name, fsync the folder; return its entry."""
        path = self.folder / (self.name if name is None else name)
        try:
            with self.partial.open("rb+") as file:
                os.fsync(file.fileno())
            self.partial.replace(path)
        finally:
            self.discard()
        _sync_folder(path.parent)
        return FileEntry(self.bytes, self.xxh3)

    def discard(self) -> None:
        """Remove the partial file, unless it was renamed into place."""
        with contextlib.suppress(OSError):
            self.partial.unlink()


_locks: set[int] = set()  # file descriptors of locks that this process holds


def _close_inherited_locks() -> None:
    """Let go of the parent's locks in a forked process, which would hold them for as long as it lives."""
    for descriptor in _locks:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _locks.clear()


os.register_at_fork(after_in_child=_close_inherited_locks)


def _is_open_at(path: Path, descriptor: int) -> bool:
    """Say whether the file at a path is the one that is open, and not another one that has taken its place."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
