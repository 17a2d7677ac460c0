"""Rows of keys or values as they are stored, and how some of them are taken: from memory, a file, or a pool of keys.

Of a small run files are mapped. Of a large one, rows that follow each other are read into memory, so that a pass holds
no more than its chunks, and only scattered rows are taken from a map.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualform.errors import CorruptError
from dualform.store.row_encoding import SCALE
from dualform.store.tensors import TensorFile

MAX_MEAN_GAP = 4  # rows; wanted rows that are closer than this on average are read with the rows between them
MAX_MAPPED_POOL_BYTES = 512 << 20  # size of a pool up to which its maps stay in memory


@dataclass(frozen=True, slots=True)
class MemoryRows:
    """Rows in memory, with their scales where they are row-scaled."""

    stored: Tensor
    scales: Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the rows are stored."""
        return self.stored.dtype

    def __len__(self) -> int:
        return len(self.stored)

    def take(self, index: slice | Tensor, into: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return some of the rows."""
        return self.stored[index], None if self.scales is None else self.scales[index]


@dataclass(frozen=True, slots=True)
class FileRows:
    """The first rows of a tensor in a file, which is opened when some are taken.

    Attributes:
        opened: returns the file.
        name: the tensor's name.
        count: the number of rows.
        below: where elements are places in something else, the number of its places; else None.
    """

    opened: Callable[[], TensorFile]
    name: str
    count: int
    below: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the rows are stored."""
        return self.opened().place(self.name).dtype

    def __len__(self) -> int:
        return self.count

    def take(self, index: slice | Tensor, into: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Read consecutive rows; scattered rows are read with the rows between them, or mapped where they are few."""
        file = self.opened()
        found = self._found(file, index, into)
        if self.below is not None and len(found[0]):
            low, high = (int(number) for number in torch.aminmax(found[0]))
            if not 0 <= low <= high < self.below:
                raise CorruptError(
                    f"{file.blob}: {self.name!r} goes from {low} to {high}; expected numbers from 0 to "
                    f"{self.below - 1}. Restore the file from a copy of the run."
                )
        return found[0], found[1] if len(found) > 1 else None

    def _found(self, file: TensorFile, index: slice | Tensor, into: Tensor | None) -> list[Tensor]:
        """Return some rows, and their scales where they have some."""
        names = [self.name, *([self.name + SCALE] if self.name + SCALE in file.places else [])]
        if isinstance(index, slice):
            start, stop, _ = index.indices(self.count)
            stop = max(start, stop)
            if file.keep_mapped:
                return [file.tensor(name)[start:stop] for name in names]
            return _read_rows(file, names, start, stop, into)
        if not len(index):
            return _read_rows(file, names, 0, 0, None)
        low, high = int(index.min()), int(index.max()) + 1
        if not 0 <= low < high <= self.count:
            raise CorruptError(
                f"{file.blob}: row {high - 1} of {self.name!r} is referred to, but it has {self.count}. "
                "Restore the run's files from a copy."
            )
        if high - low <= MAX_MEAN_GAP * len(index) and not file.keep_mapped:
            return [found[index - low] for found in _read_rows(file, names, low, high, into)]
        return [file.scattered(name, index) for name in names]


def _read_rows(file: TensorFile, names: Sequence[str], start: int, stop: int, into: Tensor | None) -> list[Tensor]:
    """Read the same rows of several tensors; rows of the first tensor go into the buffer if they fit."""
    places = [file.place(name) for name in names]
    fits = into is not None and (stop - start) * places[0].row_bytes <= into.numel()
    first = file.read(places[0], start, stop, into if fits else None)
    return [first, *(file.read(place, start, stop) for place in places[1:])]


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Rows that are kept once in a pool of distinct keys, which lies in this shard and the shards before it."""

    references: Tensor  # (n,) the key id of each row
    bases: Sequence[int]  # the key id of the first row of each source, ascending
    sources: Sequence[MemoryRows | FileRows]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the rows are stored."""
        return self.sources[0].dtype

    def __len__(self) -> int:
        return len(self.references)

    def take(self, index: slice | Tensor, into: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return some of the rows, from wherever they lie."""
        key_ids = self.references[index].long()
        if not len(key_ids):
            return self.sources[0].take(slice(0, 0))
        first = int(key_ids[0])
        home = int(np.searchsorted(self.bases, first, side="right")) - 1
        source = self.sources[home]
        end = self.bases[home] + len(source)
        if first + len(key_ids) <= end and bool((key_ids.diff() == 1).all()):  # as keys come in the first epoch
            start = first - self.bases[home]
            return source.take(slice(start, start + len(key_ids)), into)
        homes = torch.from_numpy(np.searchsorted(self.bases, key_ids.numpy(), side="right") - 1)
        empty, scale = source.take(slice(0, 0))
        stored = empty.new_empty(len(key_ids), empty.shape[1])
        scales = None if scale is None else scale.new_empty(len(key_ids))
        for i in homes.unique().tolist():
            mine = (homes == i).nonzero()[:, 0]
            found, scaled = self.sources[i].take(key_ids[mine] - self.bases[i])
            stored[mine] = found
            if scales is not None and scaled is not None:
                scales[mine] = scaled
        self._drop(homes.unique().tolist())
        return stored, scales

    def _drop(self, used: Sequence[int]) -> None:
        """Give the mapped memory of the used sources back to the system, where the pool is too large to stay mapped."""
        for i in used:
            source = self.sources[i]
            if isinstance(source, FileRows):
                file = source.opened()
                width = file.place(source.name).row_bytes
                if not file.keep_mapped and (self.bases[-1] + len(self.sources[-1])) * width > MAX_MAPPED_POOL_BYTES:
                    file.drop()
