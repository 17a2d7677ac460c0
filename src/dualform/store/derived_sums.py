"""Sums that were derived from a run's patterns, as files in its `cache` folder, for the next process.

Each file carries the version of the code that computed it and a digest of its tensors; a file of another version, with
another digest, or one that cannot be read is as good as missing. The folder is bounded, and files that were used least
recently go first. It may be deleted at any time, and nothing goes wrong where it cannot be written.
"""

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import xxhash
from torch import Tensor

from dualform._version import __version__
from dualform.store.folder import PARTIAL, remove_folder
from dualform.store.format import publish_tensors, tensor_bytes

MAX_FOLDER_BYTES = 2 << 30
SUMS_VERSION = 1
"""Version of what the sums mean. Raise it with every change to how a sum is computed or laid out."""
FOLDER = "cache"
STALE_SECONDS = 3600  # after which a partial file belongs to a writer that is gone


@dataclass(frozen=True, slots=True)
class FolderSums:
    """The derived sums of one run folder."""

    folder: Path

    def load(self, name: str) -> dict[str, Tensor] | None:
        """Return the tensors that were saved under a name; None where this code did not write them."""
        return _load(self._path(name))

    def save(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Save tensors under a name, where the folder can be written."""
        path = self._path(name)
        size = sum(tensor.nbytes for tensor in tensors.values())
        with contextlib.suppress(OSError):
            publish_tensors(path, tensors, metadata=_marks(tensors))
            _prune(path, most=max(MAX_FOLDER_BYTES, size))

    def _path(self, name: str) -> Path:
        return self.folder / FOLDER / f"{name}.safetensors"


def _marks(answer: Mapping[str, Tensor]) -> dict[str, str]:
    """Return what a cache file says of itself: the code's version, and a digest of names, shapes, dtypes and bytes."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(answer.items()):
        digest.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor_bytes(tensor))
    return {"sums": str(SUMS_VERSION), "dualform": __version__, "digest": digest.hexdigest()}


def _load(path: Path) -> dict[str, Tensor] | None:
    """Return the tensors of a cache file, or nothing where they are not what this code wrote."""
    if not path.is_file():
        return None
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            marks = file.metadata()
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        if marks != _marks(found):
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # used now
    except (OSError, ValueError, RuntimeError, safetensors.SafetensorError):
        return None
    return found


def _prune(kept: Path, *, most: int) -> None:
    """Remove the files that were used least recently until all together take at most `most` bytes."""
    found = []
    for path in kept.parent.iterdir():
        with contextlib.suppress(OSError):  # another process may remove files at the same time
            status = path.stat()
            if path.name.startswith(PARTIAL):
                if time.time() - status.st_mtime > STALE_SECONDS:
                    remove_folder(path)
            elif path.is_file():
                found.append((path != kept, -status.st_mtime_ns, status.st_size, path))
    total = 0
    for _, _, size, path in sorted(found):
        total += size
        if total > most:
            with contextlib.suppress(OSError):
                path.unlink()
