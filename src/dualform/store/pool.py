"""Identical keys, stored once: which rows of a layer were seen before. `rows.py` brings them back.

An input layer sees the same sample in every epoch, to the bit. Its keys are stored where they come first, all of them
together being the layer's pool, and a pattern holds its key id: the place of its key in the pool. A key is known by the
128-bit xxh3 of its bytes, which is stored beside it so that a resumed recording knows it too.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
import xxhash
from torch import Tensor

REFERENCES, DIGESTS = "references", "digests"  # tensors beside a layer's keys, where it has a pool
MIN_POOLED_WIDTH = 32  # elements of a key; references to narrower keys would save nothing
MAX_REMEMBERED_KEYS = 4_000_000  # of one layer; keys beyond this number are stored each time they come


@dataclass(slots=True)
class Pool:
    """The distinct keys of one layer, by their digest."""

    size: int = 0  # keys stored so far
    _known: dict[bytes, int] = field(default_factory=dict)

    def place(self, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Add the keys that are new to the pool.

        Returns the key id of each key, (T,) int32; which rows are new keys, (N,); and the digests of new keys, (N, 2).
        """
        rows = keys.contiguous().view(torch.uint8).numpy()  # numpy does not know every dtype
        digests = list(map(xxhash.xxh3_128_digest, rows))
        key_ids = [self._known.get(digest, -1) for digest in digests]
        new = []
        for i, key_id in enumerate(key_ids):
            if key_id < 0:
                found = self._known.get(digests[i])  # the same key may have come a few rows ago
                if found is None:
                    found = self.size
                    self.size += 1
                    if len(self._known) < MAX_REMEMBERED_KEYS:
                        self._known[digests[i]] = found
                    new.append(i)
                key_ids[i] = found
        digest_words = np.frombuffer(b"".join(digests[i] for i in new), dtype=np.int64).reshape(-1, 2).copy()
        return (
            torch.tensor(key_ids, dtype=torch.int32),
            torch.tensor(new, dtype=torch.int64),
            torch.from_numpy(digest_words),
        )

    def remember(self, base: int, digests: Tensor) -> None:
        """Add the keys of a published shard to the known ones; the first of them has the key id `base`."""
        for i, mark in enumerate(np.ascontiguousarray(digests.numpy())):
            if len(self._known) < MAX_REMEMBERED_KEYS:
                self._known[mark.tobytes()] = base + i
        self.size = base + len(digests)
