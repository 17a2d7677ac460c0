"""Identical keys, stored once: which rows of a layer were seen before. `rows.py` brings them back.

An input layer sees the same sample in every epoch, to the bit. Its keys are stored where they come first, all of them
together being the layer's pool, and a pattern holds the number of its key in the pool. A key is known by the 128-bit
xxh3 of its bytes, which is stored beside it so that a resumed recording knows it too.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
import xxhash
from torch import Tensor

REFERENCES, DIGESTS = "references", "digests"  # tensors beside a layer's keys, where it has a pool
WIDTH = 32  # keys that are narrower are not worth a reference
LARGEST = 4_000_000  # keys that are remembered; later ones are stored as they come


@dataclass(slots=True)
class Pool:
    """The distinct keys of one layer, by their digest."""

    size: int = 0  # keys stored so far
    _known: dict[bytes, int] = field(default_factory=dict)

    def place(self, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return each key's number, (T,) int32; the places of those that are new, (N,); and their digests, (N, 2)."""
        rows = keys.contiguous().view(torch.uint8).numpy()  # numpy does not know every dtype
        digests = list(map(xxhash.xxh3_128_digest, rows))
        numbers = [self._known.get(digest, -1) for digest in digests]
        new = []
        for i, number in enumerate(numbers):
            if number < 0:
                found = self._known.get(digests[i])  # which may have come a few rows ago
                if found is None:
                    found = self.size
                    self.size += 1
                    if len(self._known) < LARGEST:
                        self._known[digests[i]] = found
                    new.append(i)
                numbers[i] = found
        marks = np.frombuffer(b"".join(digests[i] for i in new), dtype=np.int64).reshape(-1, 2).copy()
        return torch.tensor(numbers, dtype=torch.int32), torch.tensor(new, dtype=torch.int64), torch.from_numpy(marks)

    def remember(self, base: int, digests: Tensor) -> None:
        """Know the keys of a published shard, whose first is number `base`."""
        for i, mark in enumerate(np.ascontiguousarray(digests.numpy())):
            if len(self._known) < LARGEST:
                self._known[mark.tobytes()] = base + i
        self.size = base + len(digests)
