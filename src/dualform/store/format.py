"""The run folder: the names of its files, how a file is published, and the writer's lock.

docs/format.md describes the folder for people. Here are the names for the writer and the reader, and the
write-fsync-rename that makes a file appear whole or not at all. The manifest is read and written in `manifest.py`.
"""

import contextlib
import dataclasses
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import safetensors
import safetensors.torch
import torch
import xxhash
from torch import Tensor

from dualform.engine.description import Count
from dualform.errors import CorruptError
from dualform.recording.media import CORPUS as CORPUS
from dualform.recording.media import VOCABULARY as VOCABULARY
from dualform.store.folder import PARTIAL, check_no_link, remove_folder

MANIFEST = "manifest.json"
INITIAL = "initial.safetensors"
FINAL = "final.safetensors"
FROZEN = "frozen.safetensors"
UNCOVERED = "uncovered.safetensors"
LOCK = ".lock"
STATE = ":"  # ENTRY:NAME in initial.safetensors is a warm entry of a parameter's optimizer state

Checksum = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
"""An xxh3 checksum, 64 bits, as hexadecimal."""


def shard_files(index: int) -> dict[str, str]:
    """Return the relative path of each file of a shard, by what it holds; the last is there where it is needed."""
    return {
        "patterns": f"shards/{index:06d}.safetensors",
        "calls": f"calls/{index:06d}.parquet",
        "annotations": f"annotations/{index:06d}.parquet",
        "steps": f"steps/{index:06d}.parquet",
        "uncovered": f"uncovered/{index:06d}.safetensors",
    }


STORABLE_DTYPES = frozenset(
    {
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    }
)  # fmt: skip
"""The dtypes of uncovered state whose values are kept; a tensor of another dtype is known by its checksum."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A published file: its size, its xxh3 checksum, and where it lies, if not under the name that it is listed by."""

    bytes: Count
    xxh3: Checksum
    at: str = ""


@dataclass(frozen=True, slots=True)
class Partial:
    """A file that is written, in a folder of its own beside its place, and not published yet."""

    path: Path  # where it will be
    folder: Path
    xxh3: str

    def publish(self, path: Path | None = None) -> FileEntry:
        """Fsync it, rename it to its place or to another path, fsync the folder; return its entry."""
        path = self.path if path is None else path
        partial = self.folder / self.path.name
        try:
            with partial.open("rb+") as file:
                os.fsync(file.fileno())
            entry = FileEntry(bytes=partial.stat().st_size, xxh3=self.xxh3)
            partial.replace(path)
        finally:
            self.discard()
        _sync_folder(path.parent)
        return entry

    def discard(self) -> None:
        """Leave nothing of it behind."""
        remove_folder(self.folder)


def write_partial(path: Path, write: Callable[[Path], object], *, summed: bool = False) -> Partial:
    """Let `write` fill a file in a partial folder beside `path`.

    The folder is its own, because a library that writes may put temporary files beside what it is told to write. With
    `summed`, `write` returns the checksum of what it wrote.
    """
    check_no_link(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = path.with_name(f"{PARTIAL}{uuid.uuid4().hex}")
    folder.mkdir()
    file = folder / path.name
    try:
        file.touch()
        mode = file.stat().st_mode  # what new files may be read by, whatever a library makes of it
        written = write(file)
        file.chmod(mode)
        return Partial(path, folder, str(written) if summed else checksum(file))
    except BaseException:
        remove_folder(folder)
        raise


def publish(path: Path, write: Callable[[Path], object]) -> FileEntry:
    """Let `write` fill a file, and publish it: readers see all of it or nothing, whenever we are killed."""
    return write_partial(path, write).publish()


def publish_by_content(folder: Path, name: str, write: Callable[[Path], object]) -> FileEntry:
    """Publish a file that may replace another one of its name: under a name of its own, after its content.

    What the manifest lists stays as it is until the manifest lists the new file instead.
    """
    partial = write_partial(folder / name, write)
    path = (folder / name).with_stem(f"{Path(name).stem}-{partial.xxh3}")
    entry = partial.publish(path)
    return dataclasses.replace(entry, at=path.relative_to(folder).as_posix())


def publish_tensors(
    path: Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None
) -> FileEntry:
    """Publish tensors as a safetensors file; failing to write is an `OSError`, whoever reports it."""
    return publish(path, lambda partial: write_tensors(partial, tensors, metadata))


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors to a safetensors file."""
    # A tensor that is a part of a larger storage is copied: the format has no views.
    whole = {
        name: (tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()).contiguous()
        for name, tensor in tensors.items()
    }
    try:
        safetensors.torch.save_file(whole, path, dict(metadata or {}) or None)
    except safetensors.SafetensorError as error:
        raise OSError(str(error)) from error


@contextmanager
def opened_tensors(path: Path) -> Iterator[Any]:
    """Open a published safetensors file; one that cannot be read is a `CorruptError`."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            yield file
    except (OSError, safetensors.SafetensorError) as error:
        raise CorruptError(f"{path} cannot be read: {error}. Restore the file from a copy of the run.") from error


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor's elements in their order, whatever its device and strides."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().reshape(-1)
    if plain.stride(0) != 1:  # torch calls a single element contiguous whatever its stride, and views it only by 1
        plain = torch.empty_like(plain, memory_format=torch.contiguous_format).copy_(plain)
    return plain.view(torch.uint8).numpy().data


def checksum(path: Path) -> str:
    """Return the xxh3 checksum of a file, as hexadecimal."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def is_foreign(folder: Path) -> bool:
    """Say whether a folder holds anything but a run, or what is left of one that was killed at its very start."""
    names = {path.name for path in folder.iterdir()}
    if not names or MANIFEST in names:
        return False
    return LOCK not in names or any(
        name not in (LOCK, INITIAL, FROZEN) and not name.startswith(PARTIAL) for name in names
    )


_locks: set[int] = set()  # file descriptors of locks that this process holds


def _close_inherited_locks() -> None:
    """Let go of the parent's locks in a forked process, which would hold them for as long as it lives."""
    for descriptor in _locks:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _locks.clear()


os.register_at_fork(after_in_child=_close_inherited_locks)


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Hold the folder's writer lock; yields whether it could be had. Released by the system if we are killed.

    Only the process that took it releases it: a forked one leaves it alone.
    """
    import fcntl

    path, process = folder / LOCK, os.getpid()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    _locks.add(descriptor)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        # Who held it before may have removed the file that we opened; a lock on nothing protects nothing.
        if not path.exists() or not os.path.samestat(path.stat(), os.fstat(descriptor)):
            yield False
            return
        try:
            yield True
        finally:
            if os.getpid() == process:
                path.unlink(missing_ok=True)
    finally:
        if os.getpid() == process:
            _locks.discard(descriptor)
            os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
