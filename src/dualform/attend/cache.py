"""Derived sums that are worth keeping: in memory for this process, on disk for the next.

A cached tensor is named by everything that it depends on: the published files by their checksums, the manifest's
layers, parameters and columns, the view, the layer, the grouping. Each file on disk also carries the version of the
code that computed it and a digest of its tensors; a file of another version, with another digest, or one that cannot be
read is computed again. Both places are bounded, and what was used least recently goes first. The folder may be deleted
at any time, and nothing goes wrong where it cannot be written.
"""

import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import xxhash
from torch import Tensor

from dualform._version import __version__
from dualform.store.folder import PARTIAL, remove_folder
from dualform.store.format import INITIAL, publish_tensors, tensor_bytes
from dualform.store.reader import Run

BUDGET = 256 << 20  # bytes of one answer; a larger one is computed each time
MEMORY_BYTES = 512 << 20  # of all answers of a run that are kept in this process
DISK_BYTES = 2 << 30  # of all files in a run's cache folder
SUMS_VERSION = 1
"""Version of what the cached sums mean. Raise it with every change to how a sum is computed or laid out."""
FOLDER = "cache"
_STALE_SECONDS = 3600  # after which a partial file belongs to a writer that is gone

Answer = dict[str, Tensor]


class Cache:
    """The cache of one opened run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._here: OrderedDict[str, Answer] = OrderedDict()
        self._lock = threading.Lock()
        self._of_run = _describe(run)

    def get(self, what: object, compute: Callable[[], Answer], *, budget: int | None = None) -> Answer:
        """Return the tensors named by `what` (anything with a faithful repr), computing them if need be."""
        name = xxhash.xxh3_128_hexdigest(f"{self._of_run} {what!r}".encode())
        with self._lock:
            if name in self._here:
                self._here.move_to_end(name)
                return self._here[name]
        path = self.run.folder / FOLDER / f"{name}.safetensors"
        found = _load(path)
        if found is None:
            found = {key: tensor.cpu().contiguous() for key, tensor in compute().items()}
            most = BUDGET if budget is None else budget
            if _size(found) > most:
                return found
            with contextlib.suppress(OSError):
                publish_tensors(path, found, metadata=_marks(found))
                _prune(path, most=max(DISK_BYTES, most))
        self._remember(name, found)
        return found

    def _remember(self, name: str, answer: Answer) -> None:
        """Keep an answer in memory; the least recently used go while all together are too large."""
        with self._lock:
            self._here[name] = answer
            self._here.move_to_end(name)
            while self._here and sum(map(_size, self._here.values())) > MEMORY_BYTES:
                self._here.popitem(last=False)


def _describe(run: Run) -> str:
    """Return a digest of everything in a run that derived sums depend on."""
    manifest = run.manifest
    parts = (
        [shard.entry for shard in run.shards],
        manifest.files.get(INITIAL),
        manifest.layers,
        manifest.parameters,
        manifest.optimizers,
        manifest.batch_axis,
        manifest.columns,
    )
    return xxhash.xxh3_128_hexdigest(repr(parts).encode())


def _size(answer: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in answer.values())


def _marks(answer: Mapping[str, Tensor]) -> dict[str, str]:
    """Return what a cache file says of itself: the code's version, and a digest of names, shapes, dtypes and bytes."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(answer.items()):
        digest.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor_bytes(tensor))
    return {"sums": str(SUMS_VERSION), "dualform": __version__, "digest": digest.hexdigest()}


def _load(path: Path) -> Answer | None:
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
                if time.time() - status.st_mtime > _STALE_SECONDS:
                    remove_folder(path)
            elif path.is_file():
                found.append((path != kept, -status.st_mtime_ns, status.st_size, path))
    total = 0
    for _, _, size, path in sorted(found):
        total += size
        if total > most:
            with contextlib.suppress(OSError):
                path.unlink()
