"""Rows of keys or values as they are stored, and how some of them are taken: from memory, a file, or a pool of keys.

Of a small run files are mapped. Of a large one, rows that follow each other are read into memory, so that a pass holds
no more than its chunks, and only scattered rows are taken from a map.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dualform.store.tensors import Place, TensorFile

DENSE = 4  # rows that are at most so far apart on average are read with what lies between them
LARGEST_MAP = 512 << 20  # bytes of a pool that may stay mapped


class Source(Protocol):
    """Stored rows, (n, d)."""

    @property
    def dtype(self) -> torch.dtype:
        """What they are stored in."""

    def __len__(self) -> int: ...

    def take(self, index: slice | Tensor, into: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return some rows as they are stored, and their scales where they are row-scaled.

        Args:
            index: consecutive rows, or numbers of rows.
            into: a buffer (uint8) that may be used; what is returned is then valid until it is used again.
        """


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows in memory, with their scales where they are row-scaled."""

    stored: Tensor
    scales: Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        """What they are stored in."""
        return self.stored.dtype

    def __len__(self) -> int:
        return len(self.stored)

    def take(self, index: slice | Tensor, into: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return some of the rows."""
        return self.stored[index], None if self.scales is None else self.scales[index]


@dataclass(frozen=True, slots=True)
class FileRows:
    """The first rows of a tensor in a file."""

    file: TensorFile
    place: Place
    scales: Place | None
    count: int

    @property
    def dtype(self) -> torch.dtype:
        """What they are stored in."""
        return self.place.dtype

    @property
    def nbytes(self) -> int:
        """Their bytes in the file."""
        return self.count * self.place.row_bytes

    def __len__(self) -> int:
        return self.count

    def take(self, index: slice | Tensor, into: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Read consecutive rows; take others out of what is read with them, or out of a map where they are few."""
        if isinstance(index, slice):
            start, stop, _ = index.indices(self.count)
            if self.file.keep_mapped:
                scales = None if self.scales is None else self.file.mapped(self.scales)[start:stop]
                return self.file.mapped(self.place)[start:stop], scales
            return self._read(start, max(start, stop), into)
        if not len(index):
            return self._read(0, 0, None)
        low, high = int(index.min()), int(index.max()) + 1
        if high - low <= DENSE * len(index) and not self.file.keep_mapped:
            stored, scales = self._read(low, high, into)
            return stored[index - low], None if scales is None else scales[index - low]
        scales = None if self.scales is None else self.file.mapped(self.scales)[index]
        return self.file.mapped(self.place)[index], scales

    def _read(self, start: int, stop: int, into: Tensor | None) -> tuple[Tensor, Tensor | None]:
        fits = into is not None and (stop - start) * self.place.row_bytes <= into.numel()
        stored = self.file.read(self.place, start, stop, into if fits else None)
        return stored, None if self.scales is None else self.file.read(self.scales, start, stop)


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Rows that are numbers in a pool; the pool lies in this shard and those before."""

    references: Tensor  # (n,)
    bases: Sequence[int]  # the number of each source's first row, ascending
    sources: Sequence[Rows | FileRows]

    @property
    def dtype(self) -> torch.dtype:
        """What they are stored in."""
        return self.sources[0].dtype

    def __len__(self) -> int:
        return len(self.references)

    def take(self, index: slice | Tensor, into: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return some of the rows, from wherever they lie."""
        numbers = self.references[index].long()
        if not len(numbers):
            return self.sources[0].take(slice(0, 0))
        first = int(numbers[0])
        home = int(np.searchsorted(self.bases, first, side="right")) - 1
        source = self.sources[home]
        end = self.bases[home] + len(source)
        if first + len(numbers) <= end and bool((numbers.diff() == 1).all()):  # as they came, in the first epoch
            start = first - self.bases[home]
            return source.take(slice(start, start + len(numbers)), into)
        homes = torch.from_numpy(np.searchsorted(self.bases, numbers.numpy(), side="right") - 1)
        empty, scale = source.take(slice(0, 0))
        stored = empty.new_empty(len(numbers), empty.shape[1])
        scales = None if scale is None else scale.new_empty(len(numbers))
        for i in homes.unique().tolist():
            mine = (homes == i).nonzero()[:, 0]
            found, scaled = self.sources[i].take(numbers[mine] - self.bases[i])
            stored[mine] = found
            if scales is not None and scaled is not None:
                scales[mine] = scaled
        self._drop()
        return stored, scales

    def _drop(self) -> None:
        """Let go of the maps of a pool that is too large to stay."""
        files = [source for source in self.sources if isinstance(source, FileRows)]
        if files and not files[0].file.keep_mapped and sum(rows.nbytes for rows in files) > LARGEST_MAP:
            for rows in files:
                rows.file.drop()
