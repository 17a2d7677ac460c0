"""A file that is written in large blocks and summed on the way, so that its checksum costs no second reading.

Blocks go past the system's cache of files where the file system can do that (O_DIRECT): to copy them into that cache
takes the processor as long as all else that the writer of a recording does, and pushes out what the training reads.
"""

import contextlib
import errno
import fcntl
import io
import mmap
import os

import numpy as np
import xxhash

BLOCK_BYTES = 4 << 20
"""Bytes that are written at once. Larger blocks gain nothing (of 1, 2, 4 and 8 MB on a disk that takes 2 GB/s)."""
SUMMED_BYTES = 1 << 18
"""Bytes that are copied and summed at once, while they are in the processor's cache."""
MAX_SPARE_BLOCKS = 2
"""Blocks that are kept for the next file: a shard is written while another one waits for the disk."""
_DIRECT: int = getattr(os, "O_DIRECT", 0)  # 0: there is no such way on this system
_spare: list[memoryview] = []


class SummedFile(io.RawIOBase):
    """Writes to a file that has no buffer of its own, in blocks, and takes the checksum; ends with `finish`."""

    def __init__(self, file: io.FileIO, *, direct: bool = False) -> None:
        """Write from the beginning of an empty file.

        Args:
            file: the file.
            direct: whether to go past the system's cache of files, where that can be: for what is not read back soon.
        """
        self._file = file
        self._may_be_direct = direct and bool(_DIRECT)
        self._is_direct = False
        self._block: memoryview | None = None
        self._filled = 0  # bytes of the block that wait to be written
        self.digest = xxhash.xxh3_64()
        self.count = 0

    def writable(self) -> bool:
        """Say that it can be written to."""
        return True

    def write(self, content: bytes | memoryview) -> int:  # type: ignore[override]
        """Take all of a content, and add it to the checksum."""
        if not memoryview(content).nbytes:
            return 0
        whole = np.frombuffer(content, dtype=np.uint8)  # numpy copies without holding the interpreter
        start = 0
        while start < len(whole):
            block = self._block
            if block is None:
                block = self._block = _take_block()
            size = min(SUMMED_BYTES, len(whole) - start, len(block) - self._filled)
            part = block[self._filled : self._filled + size]
            np.copyto(np.frombuffer(part, dtype=np.uint8), whole[start : start + size])
            self.digest.update(part)
            self._filled += size
            start += size
            if self._filled == len(block):
                if self._may_be_direct and not self._is_direct:
                    self._go_direct()
                self._write_block(block)
        self.count += len(whole)
        return len(whole)

    def finish(self) -> None:
        """Write what is left; nothing can be written afterwards."""
        block, self._block = self._block, None
        if block is not None:
            self._go_through_cache()  # the last bytes fill no block of the disk
            self._write_block(block)
            if len(_spare) < MAX_SPARE_BLOCKS:
                _spare.append(block)

    def _write_block(self, block: memoryview) -> None:
        """Write the bytes that wait."""
        rest = block[: self._filled]
        while rest:
            try:
                rest = rest[self._file.write(rest) :]
            except OSError as error:
                if not self._is_direct or error.errno != errno.EINVAL:
                    raise
                self._go_through_cache()  # some file systems say only when they are written to that they cannot
            if rest:
                self._go_through_cache()  # the rest of a block need not begin where one of the disk does
        self._filled = 0

    def _go_direct(self) -> None:
        """Write past the system's cache from now on, where the file system can."""
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) | _DIRECT)
            self._is_direct = True
        except OSError:
            self._may_be_direct = False

    def _go_through_cache(self) -> None:
        """Write through the system's cache from now on."""
        if self._is_direct:
            fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) & ~_DIRECT)
        self._is_direct = self._may_be_direct = False


def _take_block() -> memoryview:
    """Return memory that begins at a page, as a disk takes it, and that a forked process has a copy of."""
    with contextlib.suppress(IndexError):  # other threads write, too
        return _spare.pop()
    block = mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without large pages
            block.madvise(mmap.MADV_HUGEPAGE)  # a disk is told each page of a block, so that fewer of them cost less
    return memoryview(block)
