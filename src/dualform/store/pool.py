"""Identical keys, stored once: which rows of a layer were seen before, and where they lie.

An input layer sees the same sample in every epoch, to the bit. Its keys are stored where they come first, all of them
together being the layer's pool, and a pattern holds the number of its key in the pool. A key is known by the 128-bit
xxh3 of its bytes, which is stored beside it so that a resumed recording knows it too.
"""

from collections.abc import Sequence
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
        rows = np.ascontiguousarray(keys.numpy()).view(np.uint8)
        numbers = np.empty(len(rows), dtype=np.int32)
        new, digests = [], []
        for i, row in enumerate(rows):
            digest = xxhash.xxh3_128_digest(row.data)
            number = self._known.get(digest)
            if number is None:
                number = self.size
                self.size += 1
                if len(self._known) < LARGEST:
                    self._known[digest] = number
                new.append(i)
                digests.append(digest)
            numbers[i] = number
        marks = np.frombuffer(b"".join(digests), dtype=np.int64).reshape(-1, 2).copy()
        return torch.from_numpy(numbers), torch.tensor(new, dtype=torch.int64), torch.from_numpy(marks)

    def remember(self, base: int, digests: Tensor) -> None:
        """Know the keys of a published shard, whose first is number `base`."""
        for i, mark in enumerate(np.ascontiguousarray(digests.numpy())):
            if len(self._known) < LARGEST:
                self._known[mark.tobytes()] = base + i
        self.size = base + len(digests)


@dataclass(frozen=True, slots=True)
class Rows:
    """Stored rows of one layer in one shard, (n, d), with their scales where they are row-scaled."""

    stored: Tensor
    scales: Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        """What they are stored in."""
        return self.stored.dtype

    def take(self, index: slice | Tensor) -> tuple[Tensor, Tensor | None]:
        """Return some of the rows, as they are stored."""
        return self.stored[index], None if self.scales is None else self.scales[index]


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Rows that are numbers in a pool; the pool lies in this shard and those before."""

    references: Tensor  # (n,)
    bases: Sequence[int]  # the number of each source's first row, ascending
    sources: Sequence[Rows]

    @property
    def dtype(self) -> torch.dtype:
        """What they are stored in."""
        return self.sources[0].dtype

    def take(self, index: slice | Tensor) -> tuple[Tensor, Tensor | None]:
        """Return some of the rows, as they are stored, from wherever they lie."""
        numbers = self.references[index].long()
        if not len(numbers):
            return self.sources[0].take(slice(0, 0))
        first = int(numbers[0])
        home = int(np.searchsorted(self.bases, first, side="right")) - 1
        source = self.sources[home]
        end = self.bases[home] + len(source.stored)
        if first + len(numbers) <= end and bool((numbers.diff() == 1).all()):  # as they came, in the first epoch
            start = first - self.bases[home]
            return source.take(slice(start, start + len(numbers)))
        homes = torch.from_numpy(np.searchsorted(self.bases, numbers.numpy(), side="right") - 1)
        stored = source.stored.new_empty(len(numbers), source.stored.shape[1])
        scales = None if source.scales is None else source.scales.new_empty(len(numbers))
        for i in homes.unique().tolist():
            mine = (homes == i).nonzero()[:, 0]
            found, scaled = self.sources[i].take(numbers[mine] - self.bases[i])
            stored[mine] = found
            if scales is not None and scaled is not None:
                scales[mine] = scaled
        return stored, scales
