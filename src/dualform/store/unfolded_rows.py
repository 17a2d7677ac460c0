"""Keys of a convolution whose inputs are stored in their place: made of the inputs when some of them are taken.

Of calls whose inputs have the same sizes the inputs lie one behind the other, and so do their keys: they are a *block*.
No more inputs are in memory at once than the wanted keys need. An input whose patches are large is read and unfolded in
boxes of output locations.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualform.identity.unfolding import Box, Ints, Unfolding, boxes
from dualform.store.tensors import TensorFile
from dualform.store.unfolding_check import count_elements, parsed_sizes

MAX_READ_ELEMENTS = 1 << 20
"""Elements of inputs that are read at once for keys that do not follow each other, if it is more than one input."""
MAX_WHOLE_ELEMENTS = 1 << 22
"""Elements of one input up to which it may be read whole for such keys; of a larger one boxes are read."""


@dataclass(frozen=True, slots=True)
class InputBlock:
    """Calls of one layer that follow each other, and whose inputs have the same sizes.

    Attributes:
        first: the number of their first key among those of the layer in the shard.
        offset: the number of their first element among those of the layer in the shard.
        count: the number of their keys.
        sizes: the sizes of an input; None where the keys are stored themselves.
    """

    first: int
    offset: int
    count: int
    sizes: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, eq=False)
class InputBlocks:
    """The blocks of a layer in a shard, in order.

    Attributes:
        unfolding: how keys are taken from inputs.
        d_in: the width of a key.
        blocks: the blocks.
        ends: for each block the number of the key behind its last.
    """

    unfolding: Unfolding
    d_in: int
    blocks: tuple[InputBlock, ...]
    ends: Ints

    @classmethod
    def of_calls(
        cls, unfolding: Unfolding, d_in: int, sizes: Sequence[str | None], counts: Sequence[int]
    ) -> "InputBlocks":
        """Return the blocks of calls, given the sizes of each call's inputs as written, and its number of keys."""
        found: list[InputBlock] = []
        first = offset = 0
        for text, calls in itertools.groupby(zip(sizes, counts, strict=True), key=lambda call: call[0]):
            count = sum(number for _, number in calls)
            elements = count_elements(unfolding, d_in, text, count)
            assert elements is not None, "the shard's tables were checked"
            found.append(InputBlock(first, offset, count, None if text is None else parsed_sizes(text)))
            first, offset = first + count, offset + elements
        return cls(unfolding, d_in, tuple(found), np.cumsum([block.count for block in found], dtype=np.int64))

    @property
    def channels(self) -> int:
        """The number of channels of an input."""
        return self.d_in // math.prod(self.unfolding.kernel)


@dataclass(frozen=True, slots=True)
class UnfoldedRows:
    """The keys of a layer in a shard, whose file is opened when some are taken.

    Attributes:
        opened: returns the file.
        name: the name of the tensor with the elements of all inputs.
        blocks: where the inputs lie.
    """

    opened: Callable[[], TensorFile]
    name: str
    blocks: InputBlocks

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the inputs are stored."""
        return self.opened().place(self.name).dtype

    def __len__(self) -> int:
        return int(self.blocks.ends[-1]) if len(self.blocks.ends) else 0

    def take(self, index: slice | Tensor, into: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return some keys, (n, d_in); there are no scales. A buffer (uint8) is used where they fit."""
        file = self.opened()
        if isinstance(index, slice):
            start, stop, _ = index.indices(len(self))
            rows = self._new_rows(file, max(0, stop - start), into)
            self._fill(file, rows, start)
            return rows, None
        wanted = index.numpy()
        rows = self._new_rows(file, len(wanted), into)
        at = np.searchsorted(self.blocks.ends, wanted, side="right")
        for number in np.unique(at).tolist():
            mine = np.flatnonzero(at == number)
            block = self.blocks.blocks[number]
            self._fill_scattered(file, block, rows, mine, wanted[mine] - block.first)
        return rows, None

    def _new_rows(self, file: TensorFile, count: int, into: Tensor | None) -> Tensor:
        dtype, width = file.place(self.name).dtype, self.blocks.d_in
        size = count * width * dtype.itemsize
        if into is None or size > into.numel():
            return torch.empty(count, width, dtype=dtype)
        return into[:size].view(dtype).view(count, width)

    def _fill(self, file: TensorFile, rows: Tensor, start: int) -> None:
        """Put the keys from a number on into rows."""
        done = 0
        number = int(np.searchsorted(self.blocks.ends, start, side="right"))
        while done < len(rows):
            block = self.blocks.blocks[number]
            begin = start + done - block.first
            count = min(block.count - begin, len(rows) - done)
            self._fill_from(file, block, rows[done : done + count], begin)
            done += count
            number += 1

    def _fill_from(self, file: TensorFile, block: InputBlock, rows: Tensor, start: int) -> None:
        """Put consecutive keys of a block into rows, from the block's key `start` on."""
        unfolding, channels, width = self.blocks.unfolding, self.blocks.channels, self.blocks.d_in
        if block.sizes is None:
            rows.view(-1).copy_(self._elements(file, block.offset + start * width, len(rows) * width))
            return
        grid, elements = unfolding.locations(block.sizes), channels * math.prod(block.sizes)
        places = unfolding.places(channels, block.sizes)
        done = 0
        for first, inputs, begin, end in _by_input(start, start + len(rows), math.prod(grid)):
            at, mine = block.offset + first * elements, rows[done : done + inputs * (end - begin)]
            done += len(mine)
            if places is not None:
                found = self._elements(file, at, inputs * elements).view(inputs, elements)
                torch.index_select(found, 1, places[begin:end].reshape(-1), out=mine.view(inputs, -1))
                continue
            for i in range(inputs):
                self._fill_in_boxes(
                    file, at + i * elements, block.sizes, mine[i * (end - begin) :][: end - begin], begin
                )

    def _fill_in_boxes(self, file: TensorFile, offset: int, sizes: tuple[int, ...], rows: Tensor, start: int) -> None:
        """Put consecutive keys of one large input into rows, from the location `start` on."""
        done = 0
        for box in boxes(self.blocks.unfolding.locations(sizes), start, start + len(rows)):
            count = math.prod(high - low for low, high in box)
            self.blocks.unfolding.fill_by_offset(rows[done : done + count], self._read_box(file, offset, sizes, box))
            done += count

    def _read_box(self, file: TensorFile, offset: int, sizes: tuple[int, ...], box: Box) -> Tensor:
        """Return the part of an input, (1, channels, ...), whose patches are those of a box of locations.

        Of each channel the rows of the first axis that lie in any patch are read.
        """
        unfolding = self.blocks.unfolding
        every = zip(box, unfolding.stride, unfolding.extents, strict=True)
        (low, high), *others = [(first * step, (last - 1) * step + extent) for (first, last), step, extent in every]
        row = math.prod(sizes[1:])
        per_channel = sizes[0] * row
        begins = [offset + channel * per_channel + low * row for channel in range(self.blocks.channels)]
        found = file.read_parts(self.name, begins, (high - low) * row).view(1, len(begins), high - low, *sizes[1:])
        for axis, (begin, end) in enumerate(others, start=3):
            found = found.narrow(axis, begin, end - begin)
        return found

    def _fill_scattered(self, file: TensorFile, block: InputBlock, rows: Tensor, where: Ints, wanted: Ints) -> None:
        """Put keys of a block that need not follow each other into rows.

        Args:
            file: the shard's file.
            block: the block.
            rows: takes the keys.
            where: the number of each key's row, (n,).
            wanted: the number of each key in the block, (n,).
        """
        unfolding, channels, width = self.blocks.unfolding, self.blocks.channels, self.blocks.d_in
        sizes = block.sizes
        if sizes is None:
            per_input, elements, offsets = 1, width, np.arange(width)
        else:
            per_input, elements = math.prod(unfolding.locations(sizes)), channels * math.prod(sizes)
            offsets = unfolding.offsets(channels, sizes)
        if sizes is not None and self._takes_boxes(sizes, wanted):
            for begin, end in _runs(wanted):
                part = torch.empty(end - begin, width, dtype=rows.dtype)
                self._fill_from(file, block, part, int(wanted[begin]))
                rows[torch.from_numpy(where[begin:end])] = part
            return
        inputs, location = np.divmod(wanted, per_input)
        for few in _limited(inputs, MAX_READ_ELEMENTS // elements, MAX_READ_ELEMENTS // width):
            each, at = np.unique(inputs[few], return_inverse=True)
            begins = [block.offset + number * elements for number in each.tolist()]
            held = file.read_parts(self.name, begins, elements).view(-1)
            first = at * elements + (0 if sizes is None else unfolding.begins(location[few], sizes))
            rows[torch.from_numpy(where[few])] = held.take(torch.from_numpy(np.add.outer(first, offsets)))

    def _takes_boxes(self, sizes: tuple[int, ...], wanted: Ints) -> bool:
        """Say whether less is read if a box is read for each run of wanted keys, and not every input whole."""
        unfolding, channels = self.blocks.unfolding, self.blocks.channels
        elements, per_input = channels * math.prod(sizes), math.prod(unfolding.locations(sizes))
        if not unfolding.is_large(channels, sizes):
            return False
        runs = 1 + np.count_nonzero(np.diff(wanted) != 1)
        few = runs * unfolding.extents[0] * (elements // sizes[0]) < len(np.unique(wanted // per_input)) * elements
        return elements > MAX_WHOLE_ELEMENTS or bool(few)

    def _elements(self, file: TensorFile, start: int, count: int) -> Tensor:
        """Return consecutive elements of the inputs, (count,): mapped where the file stays mapped, or read."""
        if file.keep_mapped:
            return file.tensor(self.name)[start : start + count]
        return file.read(file.place(self.name), start, start + count)


def _by_input(start: int, stop: int, size: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut consecutive keys where an input of `size` keys begins; whole inputs stay together.

    Yield the number of the first input, the number of inputs, and the first key of each and the one behind its last.

    >>> list(_by_input(3, 14, 4))
    [(0, 1, 3, 4), (1, 2, 0, 4), (3, 1, 0, 2)]
    """
    if begin := start % size:
        end = min(size, begin + stop - start)
        yield start // size, 1, begin, end
        start += end - begin
    if whole := (stop - start) // size:
        yield start // size, whole, 0, size
        start += whole * size
    if start < stop:
        yield start // size, 1, 0, stop - start


def _runs(numbers: Ints) -> Iterator[tuple[int, int]]:
    """Yield where numbers that follow each other begin and end in an array."""
    edges = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
    yield from itertools.pairwise(edges)


def _limited(inputs: Ints, most_inputs: int, most_keys: int) -> Iterator[Ints]:
    """Cut keys, given the input of each, into parts of few keys of few inputs, at least one: yield their places, (n,).

    >>> [part.tolist() for part in _limited(np.array([7, 5, 7, 6]), 2, 9)]
    [[1, 3], [0, 2]]
    """
    order = np.argsort(inputs, kind="stable")
    number = np.cumsum(np.diff(inputs[order], prepend=inputs[order[:1]]) > 0)  # of each key's input among all
    parts = np.stack([number // max(1, most_inputs), np.arange(len(order)) // max(1, most_keys)])
    yield from np.split(order, np.flatnonzero(np.diff(parts).any(axis=0)) + 1)
