"""Identical keys, stored once: which rows of a layer were seen before. `rows.py` brings them back.

An input layer sees the same sample in every epoch, to the bit. Its keys are stored where they come first, all of them
together being the layer's pool, and a pattern holds its key id: the place of its key in the pool. A key is known by the
128-bit xxh3 of its bytes, which is stored beside it so that a resumed recording knows it too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

REFERENCES, DIGESTS = "references", "digests"  # tensors beside a layer's keys, where it has a pool
MIN_POOLED_WIDTH = 32  # elements of a key; references to narrower keys would save nothing
PART_BYTES = 1 << 19  # of keys that are looked at together, while they are in the processor's cache
MAX_REMEMBERED_KEYS = 4_000_000  # of one layer; keys beyond this number are stored each time they come


@dataclass(slots=True)
class Pool:
    """The distinct keys of one layer, by their digest."""

    size: int = 0  # keys stored so far
    _known: dict[bytes, int] = field(default_factory=dict)

    def place(self, keys: Tensor, look: Callable[[Tensor], object] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Add the keys that are new to the pool.

        Returns the key id of each key, (T,) int32; which rows are new keys, (N,); and the digests of new keys, (N, 2).

        Args:
            keys: (T, d_in)
            look: is called with each part of the keys after its digests are taken, while the processor's cache has it.
        """
        digests: list[bytes] = []
        for part in keys.contiguous().split(max(1, PART_BYTES // max(1, keys[:1].nbytes))):
            digests += map(xxhash.xxh3_128_digest, part.view(torch.uint8).numpy())  # numpy does not know every dtype
            if look is not None:
                look(part)
        key_ids: list[Any] = list(map(self._known.get, digests))
        new: Sequence[int] = ()
        if None in key_ids:
            new = self._add_distinct(digests, key_ids) or self._add_each(digests, key_ids)
        digest_words = np.frombuffer(bytearray().join([digests[i] for i in new]), dtype=np.int64).reshape(-1, 2)
        return (
            torch.from_numpy(np.array(key_ids, dtype=np.int32)),
            torch.from_numpy(np.array(new, dtype=np.int64)),
            torch.from_numpy(digest_words),
        )

    def _add_distinct(self, digests: Sequence[bytes], key_ids: list[Any]) -> Sequence[int]:
        """Add the keys of a batch if all are new and distinct, as in a first epoch; return which rows are new.

        Does nothing, and returns nothing, where some are not, or are too many to remember.
        """
        count = len(digests)
        room = len(self._known) + count <= MAX_REMEMBERED_KEYS
        if not room or key_ids.count(None) < count or len(set(digests)) < count:
            return ()
        key_ids[:] = range(self.size, self.size + count)
        self._known.update(zip(digests, key_ids, strict=True))
        self.size += count
        return range(count)

    def _add_each(self, digests: Sequence[bytes], key_ids: list[Any]) -> Sequence[int]:
        """Add the keys without a key id, one after the other; return which rows are new."""
        new = []
        for i, digest in enumerate(digests):
            if key_ids[i] is None:
                found = self._known.get(digest)  # the same key may have come a few rows ago
                if found is None:
                    found = self.size
                    self.size += 1
                    if len(self._known) < MAX_REMEMBERED_KEYS:
                        self._known[digest] = found
                    new.append(i)
                key_ids[i] = found
        return new

    def remember(self, base: int, digests: Tensor) -> None:
        """Add the keys of a published shard to the known ones; the first of them has the key id `base`."""
        for i, mark in enumerate(np.ascontiguousarray(digests.numpy())):
            if len(self._known) < MAX_REMEMBERED_KEYS:
                self._known[mark.tobytes()] = base + i
        self.size = base + len(digests)
