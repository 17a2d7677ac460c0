"""Sums that were derived from a run's patterns, as files under `cache/` beside them, for the next process.

Each file carries the version of the code that computed it and a digest of its tensors; a file of another version, with
another digest, or one that cannot be read is as good as missing. The bytes of all files together are bounded, and
files that were used least recently go first. They may be deleted at any time, and nothing goes wrong where none can be
written.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

import xxhash
from torch import Tensor

from dualform._version import __version__
from dualform.errors import CorruptError
from dualform.store.blobs import Blob, Blobs
from dualform.store.tensors import TensorFile, publish_tensors, tensor_bytes

MAX_SUMS_BYTES = 2 << 30
SUMS_VERSION = 1
"""Version of what the sums mean. Raise it with every change to how a sum is computed or laid out."""
PREFIX = "cache/"
STALE_SECONDS = 3600.0  # after which a file that is not published yet belongs to a writer that is gone


@dataclass(frozen=True, slots=True)
class StoredSums:
    """The derived sums of one run."""

    blobs: Blobs

    def load(self, name: str) -> dict[str, Tensor] | None:
        """Return the tensors that were saved under a name; None where this code did not write them."""
        blob = self._blob(name)
        if self.blobs.size(blob.name) is None:
            return None
        found = _loaded(blob)
        if found is not None:
            self.blobs.mark_used(blob.name)
        return found

    def save(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Save tensors under a name, where that is possible."""
        blob = self._blob(name)
        size = sum(tensor.nbytes for tensor in tensors.values())
        with contextlib.suppress(OSError):
            publish_tensors(self.blobs, blob.name, tensors, metadata=_sums_metadata(tensors))
            self._prune(blob.name, most=max(MAX_SUMS_BYTES, size))

    def _prune(self, kept: str, *, most: int) -> None:
        """Remove the files that were used least recently until all together take at most `most` bytes."""
        self.blobs.remove_unpublished(PREFIX, older_than_seconds=STALE_SECONDS)
        total = 0
        for name, size in sorted(self.blobs.by_use(PREFIX), key=lambda each: each[0] != kept):
            total += size
            if total > most:
                with contextlib.suppress(OSError):
                    self.blobs.remove(name)

    def _blob(self, name: str) -> Blob:
        return Blob(self.blobs, f"{PREFIX}{name}.safetensors")


def _sums_metadata(answer: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the metadata of a file of sums: the code's version, a digest of names, shapes, dtypes and bytes."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(answer.items()):
        digest.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor_bytes(tensor))
    return {"sums": str(SUMS_VERSION), "dualform": __version__, "digest": digest.hexdigest()}


def _loaded(blob: Blob) -> dict[str, Tensor] | None:
    """Return the tensors of a file of sums, or None if this version of the code did not write them."""
    try:
        file = TensorFile(blob)
        found = file.tensors()
        return found if file.metadata == _sums_metadata(found) else None
    except (OSError, CorruptError):
        return None
