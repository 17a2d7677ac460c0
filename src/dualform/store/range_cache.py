"""Ranges of blobs that were read from object storage, on this machine's disk, bounded in bytes.

One sparse file per blob holds the blocks that were read, and one beside it a checksum per block. A block counts only
if its checksum fits, so that a crash, a full disk or two processes at once can lose blocks and never give a wrong one.
Blobs that were used least recently go first. Nothing goes wrong where nothing can be written.
"""

import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

BLOCK_BYTES = 1 << 18  # a request to object storage takes as long as some megabytes, so that more is no loss
MAX_CACHE_BYTES = 4 << 30
KEPT_SHARE = 0.75  # of the bound that is kept when room has to be made, so that it is not made for every block
SUMS = ".sums"


def cache_place() -> Path:
    """Return the folder of the cache: `ranges` in the folder that `DUALFORM_CACHE` names, or in the user's cache."""
    named = os.environ.get("DUALFORM_CACHE")
    if named:
        return Path(named).expanduser() / "ranges"
    usual = os.environ.get("XDG_CACHE_HOME")
    return (Path(usual) if usual else Path("~/.cache").expanduser()) / "dualform" / "ranges"


def cache_bytes() -> int:
    """Return how many bytes the cache may take: what `DUALFORM_CACHE_BYTES` says, or 4 GiB; 0 for no cache."""
    named = os.environ.get("DUALFORM_CACHE_BYTES", "")
    return int(named) if named.isdecimal() else MAX_CACHE_BYTES


class RangeCache:
    """Blocks of blobs on disk. Any number of threads and processes may use one folder.

    Args:
        folder: where it is; made when something is kept, for its owner alone, since runs hold training data.
        limit: bytes that it may take; 0 keeps nothing.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self._used: int | None = None  # bytes that the folder takes, as far as this process knows
        self._lock = threading.Lock()

    def get(self, key: str, size: int, blocks: Sequence[int]) -> dict[int, bytes]:
        """Return those of a blob's blocks that are here.

        Args:
            key: names the content of a blob.
            size: its bytes.
            blocks: numbers of blocks, ascending.
        """
        found: dict[int, bytes] = {}
        if not self.limit or not blocks:
            return found
        path = self.folder / key
        with contextlib.suppress(OSError), path.open("rb") as data, Path(f"{path}{SUMS}").open("rb") as file:
            sums = np.frombuffer(file.read(), dtype="<u8", count=-(-size // BLOCK_BYTES))
            for block in blocks:
                if sums[block]:
                    content = os.pread(data.fileno(), min(BLOCK_BYTES, size - block * BLOCK_BYTES), block * BLOCK_BYTES)
                    if xxhash.xxh3_64_intdigest(content) == int(sums[block]):
                        found[block] = content
            os.utime(data.fileno())
        return found

    def put(self, key: str, size: int, block: int, content: memoryview) -> None:
        """Keep blocks of a blob that follow each other, where there is room; `block` is the number of the first."""
        if not self._make_room(len(content)):
            return
        path = self.folder / key
        starts = range(0, len(content), BLOCK_BYTES)
        sums = [xxhash.xxh3_64_intdigest(content[start : start + BLOCK_BYTES]) for start in starts]
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _write_at(path, size, block * BLOCK_BYTES, content)
            _write_at(Path(f"{path}{SUMS}"), -(-size // BLOCK_BYTES) * 8, block * 8, np.array(sums, dtype="<u8").data)

    def used(self) -> int:
        """Return how many bytes the cache takes on the disk."""
        return sum(size for _, size, _ in self._files())

    def _make_room(self, count: int) -> bool:
        """Remove blobs that were used least recently until `count` bytes more fit; say whether they do."""
        if count > self.limit:
            return False
        with self._lock:
            if self._used is None:
                self._used = self.used()
            if self._used + count > self.limit:
                files = sorted(self._files())
                self._used = sum(size for _, size, _ in files)
                for _, size, path in files:
                    if self._used + count <= KEPT_SHARE * self.limit:
                        break
                    with contextlib.suppress(OSError):
                        path.unlink()
                        Path(f"{path}{SUMS}").unlink(missing_ok=True)
                        self._used -= size
            if self._used + count > self.limit:
                return False
            self._used += count
            return True

    def _files(self) -> list[tuple[float, int, Path]]:
        """Return when each kept blob was used last, the bytes that it takes, and its file."""
        found = []
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                with contextlib.suppress(OSError):
                    if not path.name.endswith(SUMS):
                        status = path.stat()
                        found.append((status.st_mtime, status.st_blocks * 512, path))
        return found


def _write_at(path: Path, size: int, offset: int, content: memoryview) -> None:
    """Write a part of a sparse file of a fixed size, which is made if it is not there."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if os.fstat(descriptor).st_size != size:
            os.ftruncate(descriptor, size)
        rest = content.cast("B")
        while rest:
            count = os.pwrite(descriptor, rest, offset)
            rest, offset = rest[count:], offset + count
    finally:
        os.close(descriptor)
