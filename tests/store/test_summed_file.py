"""Files that are written in blocks: every byte, in its place, whatever the blocks and the file system."""

import errno
import fcntl
import io
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import xxhash

from dualform.store import summed_file
from dualform.store.summed_file import SummedFile

BLOCK = 1 << 13


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summed_file, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(summed_file, "SUMMED_BYTES", 3000)
    monkeypatch.setattr(summed_file, "_spare", [])


def parts_of(sizes: Sequence[int]) -> list[bytes]:
    return [bytes((7 * i + number) % 251 for i in range(size)) for number, size in enumerate(sizes)]


def write(path: Path, sizes: Sequence[int], *, kind: type[io.FileIO] = io.FileIO, direct: bool = True) -> SummedFile:
    """Write parts of these sizes, and compare what lies in the file with them."""
    with kind(path, "xb") as raw:
        file = SummedFile(raw, direct=direct)
        for part in parts_of(sizes):
            assert file.write(part) == len(part)
        file.finish()
        flags = fcntl.fcntl(raw, fcntl.F_GETFL)
        assert not flags & getattr(os, "O_DIRECT", 0)
    content = b"".join(parts_of(sizes))
    assert path.read_bytes() == content
    assert (file.count, file.digest.hexdigest()) == (len(content), xxhash.xxh3_64_hexdigest(content))
    return file


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("sizes", [(), (0,), (5,), (BLOCK,), (BLOCK - 1, 2), (3 * BLOCK, 0, 1), (1, 5 * BLOCK + 77)])
def test_every_byte_is_written_and_summed(tmp_path: Path, sizes: Sequence[int], direct: bool) -> None:
    write(tmp_path / "file", sizes, direct=direct)


class Watched(io.FileIO):
    """A file that notes whether each write went past the system's cache."""

    def __init__(self, path: Path, mode: str) -> None:
        super().__init__(path, mode)
        self.writes: list[tuple[int, bool]] = []

    def write(self, content: memoryview) -> int:  # type: ignore[override]
        flags = fcntl.fcntl(self, fcntl.F_GETFL)
        written = super().write(content)
        self.writes.append((written, bool(flags & getattr(os, "O_DIRECT", 0))))
        return written


def test_blocks_go_past_the_cache_and_the_rest_through_it(tmp_path: Path) -> None:
    files: list[Watched] = []

    class Kept(Watched):
        def __init__(self, path: Path, mode: str) -> None:
            super().__init__(path, mode)
            files.append(self)

    write(tmp_path / "large", (2 * BLOCK + 100,), kind=Kept)
    write(tmp_path / "small", (100,), kind=Kept)
    large, small = (file.writes for file in files)
    can = large[0][1]  # whether this file system can
    assert large == [(BLOCK, can), (BLOCK, can), (100, False)]
    assert small == [(100, False)]


class Refusing(Watched):
    """A file of a file system that lets a direct write fail."""

    def write(self, content: memoryview) -> int:  # type: ignore[override]
        if fcntl.fcntl(self, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, "Invalid argument")
        return super().write(content)


class Halting(Watched):
    """A file of which a write takes only a part."""

    def write(self, content: memoryview) -> int:  # type: ignore[override]
        return super().write(content[: min(len(content), 1000)])


@pytest.mark.parametrize("kind", [Refusing, Halting])
def test_a_file_system_that_cannot_is_written_to_all_the_same(tmp_path: Path, kind: type[io.FileIO]) -> None:
    write(tmp_path / "file", (BLOCK + 10, 3 * BLOCK), kind=kind)


def test_a_file_system_that_does_not_know_the_flag_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.fcntl

    def refusing(file: io.FileIO, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(file, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", refusing)
    write(tmp_path / "file", (3 * BLOCK + 10,))


def test_other_errors_are_raised(tmp_path: Path) -> None:
    class Full(Watched):
        def write(self, content: memoryview) -> int:  # type: ignore[override]
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "file", (BLOCK,), kind=Full)


def test_memory_is_used_again_and_never_by_two_files_at_once(tmp_path: Path) -> None:
    with io.FileIO(tmp_path / "a", "xb") as one, io.FileIO(tmp_path / "b", "xb") as other:
        first, second = SummedFile(one), SummedFile(other)
        first.write(b"a" * 10)
        second.write(b"b" * 10)
        first.finish()
        second.finish()
        assert len(summed_file._spare) == 2
    write(tmp_path / "c", (10,))
    assert len(summed_file._spare) == 2
    assert (tmp_path / "a").read_bytes() == b"a" * 10
    assert (tmp_path / "b").read_bytes() == b"b" * 10
