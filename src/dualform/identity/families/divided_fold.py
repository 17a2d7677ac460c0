"""The shares of one parameter of which processes have rows each: every process folds the shares of its own rows.

A process's own patterns give every row of the parameter a gradient, and each row's gradient is the sum over processes.
So a step needs the gradients that the patterns of all processes give this process's rows; everything else goes as in
`ParameterFold`, on these rows alone. Two exchanges lead to them, and the one with fewer bytes is taken: sums of whole
gradients by group, of which each process gets its rows (`SummedRows`); or the patterns themselves, with the values cut
to the rows of the process that gets them (`SentPatterns`). The exchanges are asked for here and made elsewhere, for
many parameters at once: nothing in this file knows of processes but their number.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dualform.identity.families.optimizer_kind import StepMatrix
from dualform.identity.families.parameter_fold import ParameterFold, UseKey, UseRows, multiply
from dualform.identity.grouped_products import RowGroups, add_by_group
from dualform.identity.parameter_maps import OuterMap, ParameterMap, RowsMap
from dualform.identity.row_division import own_rows

MAX_SUM_BYTES = 32 << 20
"""Bytes of whole gradients that are made for one sum: of as many groups as fit, and of one at the least."""


@dataclass(frozen=True, slots=True)
class StepUse:
    """What the processes have told each other of one use of a parameter in a step.

    Attributes:
        parameter_map: how the parameter is made of patterns.
        groups: the groups that have a pattern in any process, ascending.
        rows: how many patterns each process has.
    """

    parameter_map: ParameterMap

    groups: tuple[int, ...]
    rows: tuple[int, ...]


class Exchange(Protocol):
    """What processes send each other for one use of a parameter, as numbers of one dtype."""

    @property
    def dtype(self) -> torch.dtype:
        """What the numbers are."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes, about; the same in every process."""

    def outgoing(self) -> list[Tensor]:
        """Return the numbers for each process, (numbers,), in the order of ranks."""

    def incoming(self, rank: int) -> list[int]:
        """Return how many numbers a process gets from each process."""

    def take(self, received: Sequence[Tensor]) -> None:
        """Take the numbers from each process, (numbers,), in the order of ranks."""


@dataclass(frozen=True, slots=True)
class SummedRows:
    """A sum over processes of tensors of which each process gets its own rows: a reduce-scatter.

    Attributes:
        shape: (n, rows, ...) what each process adds.
        dtype: the dtype of the sum.
        processes: how many processes there are.
        make: returns this process's part, in this shape.
        give: takes this process's rows of the sum, (n, own rows, ...).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    processes: int
    make: Callable[[], Tensor]
    give: Callable[[Tensor], None]

    @property
    def nbytes(self) -> int:
        """Bytes of what each process adds."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def outgoing(self) -> list[Tensor]:
        """Return each process's rows of what this process adds."""
        part = self.make()
        return [part[:, self._rows(rank)].reshape(-1) for rank in range(self.processes)]

    def incoming(self, rank: int) -> list[int]:
        """Return the number of elements of a process's rows, for each process."""
        rows = self._rows(rank)
        return [(rows.stop - rows.start) * self.shape[0] * torch.Size(self.shape[2:]).numel()] * self.processes

    def take(self, received: Sequence[Tensor]) -> None:
        """Add up, in the order of ranks."""
        total = torch.stack(list(received)).sum(0)
        count = torch.Size((self.shape[0], *self.shape[2:])).numel()
        self.give(total.view(self.shape[0], len(total) // max(1, count), *self.shape[2:]))

    def _rows(self, rank: int) -> slice:
        return own_rows(self.shape[1], rank, self.processes)


@dataclass(frozen=True, slots=True)
class SentPatterns:
    """The patterns of one use of a matrix, sent to every process with what it needs of their values.

    Attributes:
        whole: the shape of the whole parameter.
        like: has the dtype in which keys and values are sent, and the device; whole numbers travel as its bits.
        rank: the number of this process.
        counts: how many patterns each process has.
        widths: of a key and of a value.
        parameter_map: an `OuterMap`, whose values are cut, or a `RowsMap`, whose values belong to one row each.
        rows: this process's patterns.
        give: takes the patterns of all processes, as patterns of a parameter with this process's rows alone.
    """

    whole: tuple[int, ...]
    like: Tensor
    rank: int
    counts: tuple[int, ...]
    widths: tuple[int, int]
    parameter_map: ParameterMap
    rows: Sequence[UseRows]
    give: Callable[[UseRows], None]

    @property
    def dtype(self) -> torch.dtype:
        """What keys and values are sent in."""
        return self.like.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the patterns of all processes, as one process gets them."""
        numbers = sum(self.counts) * self._per_pattern(0)
        return numbers * self.like.element_size()

    def _per_pattern(self, rank: int) -> int:
        """Return how many numbers a process gets of each pattern: its group, its key, and its value or a part of it."""
        return 1 + self.widths[0] + self._value_columns(rank)

    def _value_columns(self, rank: int) -> int:
        rows = self._rows(rank)
        return self.widths[1] if isinstance(self.parameter_map, RowsMap) else rows.stop - rows.start

    def outgoing(self) -> list[Tensor]:
        """Return groups, keys and values for each process, one after the other."""
        if not self.rows:
            return [self.like.new_empty(0, dtype=self.dtype)] * len(self.counts)
        codes = torch.cat([one.codes for one in self.rows]).to(self.like.device)
        keys = torch.cat([one.keys for one in self.rows]).to(self.like.device)
        values = torch.cat([one.values.to(self.like) * one.factor for one in self.rows])
        same = [_bits(codes, self.dtype), _bits(keys, self.dtype)]
        found = []
        for rank in range(len(self.counts)):
            mine = values if isinstance(self.parameter_map, RowsMap) else values[:, self._rows(rank)]
            found.append(torch.cat([part.reshape(-1) for part in (*same, mine)]))
        return found

    def incoming(self, rank: int) -> list[int]:
        """Return how many numbers a process gets of the patterns of each process."""
        return [count * self._per_pattern(rank) for count in self.counts]

    def take(self, received: Sequence[Tensor]) -> None:
        """Put the patterns of all processes together."""
        rank, (d_in, _) = self.rank, self.widths
        parts: list[list[Tensor]] = [[], [], []]
        for piece, count in zip(received, self.counts, strict=True):
            columns = self._value_columns(rank)
            pieces = piece.split([count, count * d_in, count * columns])
            for part, one, width in zip(parts, pieces, (1, d_in, columns), strict=True):
                part.append(one.view(count, width))
        codes, keys, values = (torch.cat(part) for part in parts)
        codes = _whole_numbers(codes.view(-1)).cpu()
        if isinstance(self.parameter_map, RowsMap):
            each = torch.Size(self.whole[1:-1]).numel()  # rows of the table in a row of the parameter
            ids = _whole_numbers(keys) - self._rows(rank).start * each
            there = (ids.view(-1) >= 0) & (ids.view(-1) < (self._rows(rank).stop - self._rows(rank).start) * each)
            mine = there.nonzero().view(-1)
            keys, values, codes = ids[mine], values[mine], codes[mine.cpu()]
        groups = RowGroups.of_codes(codes)
        self.give(UseRows((0, 0, 0), self.parameter_map, values, keys, codes, 1.0, groups))

    def _rows(self, rank: int) -> slice:
        return own_rows(self.whole[0], rank, len(self.counts))


def _bits(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers in a dtype of floating point; whole numbers as the bits of its numbers."""
    if numbers.is_floating_point():
        return numbers.to(dtype)
    return numbers.to(_whole_dtype(dtype)).view(dtype)


def _whole_numbers(bits: Tensor) -> Tensor:
    """Return the whole numbers that `_bits` made."""
    return bits.contiguous().view(_whole_dtype(bits.dtype)).long()


def _whole_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.int64 if dtype == torch.float64 else torch.int32


class DividedFold(ParameterFold):
    """The parts of one process's rows of a parameter on their way through its live steps.

    Attributes:
        uses: what the processes have of each use in the step that comes next; to be set before each step.
        exchanges: what the moves that `step` has returned wait for; whoever makes them takes them out.
    """

    def __init__(self, shape: Sequence[int], *, whole: Sequence[int], rank: int, **settings: Any) -> None:
        """Begin with nothing but the start.

        Args:
            shape: of this process's rows.
            whole: the shape of the whole parameter.
            rank: the number of this process.
            settings: as `ParameterFold` has them.
        """
        super().__init__(shape, **settings)
        self._whole_shape = tuple(whole)
        self._rank = rank
        self.uses: Mapping[UseKey, StepUse] = {}
        self.exchanges: list[Exchange] = []

    @property
    def moved_bytes(self) -> int:
        """The bytes that a step moves of all rows, at the most: the same number in every process."""
        return self._width * (1 + sum(len(stack.weight) for stack in self.stacks.values()))

    @property
    def _width(self) -> int:
        return torch.Size(self._whole_shape).numel() * self.whole.weight.itemsize

    def _rows_by_use(self, rows: Sequence[UseRows]) -> dict[UseKey, list[UseRows]]:
        """Return this process's patterns of each use that has a pattern in any process."""
        found: dict[UseKey, list[UseRows]] = {}
        for use, told in self.uses.items():
            self.stack(use).see(told.groups)
            found[use] = [one for one in rows if one.use == use]
        return found

    def _add_gradients(self, total: Tensor, use: UseKey, rows: Sequence[UseRows], *, keep: float, take: float) -> None:
        """Multiply totals by group by `keep`, and ask for the gradients of the step's patterns, `take` times."""
        if keep != 1.0:
            total.mul_(keep)
        if use in self.uses:
            self._ask(self.uses[use], rows, [(total, take)])

    def _wait(self, numbers: StepMatrix, rows: Sequence[UseRows]) -> None:
        """Fold a step whose map is made of numbers at once: to read shares, processes need not wait for each other."""
        left = StepMatrix(numbers.weight, numbers.average)
        by_use = self._rows_by_use(rows)
        of_weight, of_average = numbers.gradient
        for use, stack in self.stacks.items():
            groups = self.uses[use].groups if use in self.uses else ()
            for group in stack.seen.difference(groups):
                stack.wait(group, left)
            if of_average or left.average[0]:
                stack.need_average()
            for group in groups:
                stack.catch_up(group)
                multiply(*stack.parts_of(group), left)
            if groups:
                into = [(stack.weight, of_weight)]
                if stack.average is not None and of_average:
                    into.append((stack.average, of_average))
                self._ask(self.uses[use], by_use[use], into)

    def _ask(self, told: StepUse, rows: Sequence[UseRows], into: Sequence[tuple[Tensor, float]]) -> None:
        """Ask for the gradients of a use by group, to be added to totals (G, ...), each multiplied by a number."""
        if (sent := self._patterns(told, rows, into)) is not None and sent.nbytes < len(told.groups) * self._width:
            self.exchanges.append(sent)
            return
        fitting = max(1, MAX_SUM_BYTES // max(1, self._width))
        for begin in range(0, len(told.groups), fitting):
            some = told.groups[begin : begin + fitting]
            make, give = partial(self._sum_groups, rows, some), partial(_add_sums, some, into)
            shape, dtype = (len(some), *self._whole_shape), self.whole.weight.dtype
            self.exchanges.append(SummedRows(shape, dtype, len(told.rows), make, give))

    def _patterns(
        self, told: StepUse, rows: Sequence[UseRows], into: Sequence[tuple[Tensor, float]]
    ) -> SentPatterns | None:
        """Return the exchange of a use's patterns; None for a use whose values cannot be cut to rows."""
        if type(told.parameter_map) not in (OuterMap, RowsMap):
            return None
        is_table = isinstance(told.parameter_map, RowsMap)
        d_out = self._whole_shape[-1 if is_table else 0]
        d_in = 1 if is_table else torch.Size(self._whole_shape[1:]).numel()
        return SentPatterns(
            self._whole_shape,
            self.whole.weight,
            self._rank,
            told.rows,
            (d_in, d_out),
            told.parameter_map,
            rows,
            partial(self._add_patterns, into),
        )

    def _add_patterns(self, into: Sequence[tuple[Tensor, float]], rows: UseRows) -> None:
        """Add the gradients of patterns by group to totals of all groups, each multiplied by a number."""
        if not self.whole.weight.numel() or not rows.groups.present:
            return
        for total, factor in into:
            add_by_group(total, rows.parameter_map, rows.values, rows.keys, rows.groups, keep=1.0, take=factor)

    def _sum_groups(self, rows: Sequence[UseRows], groups: Sequence[int]) -> Tensor:
        """Return the gradient that this process's patterns give each of some groups, with all rows, (n, rows, ...)."""
        total = self.whole.weight.new_zeros(len(groups), *self._whole_shape)
        for one in rows:
            mine = _among(one, groups)
            if mine.groups.present:
                add_by_group(total, mine.parameter_map, mine.values, mine.keys, mine.groups, keep=1.0, take=mine.factor)
        return total


def _among(rows: UseRows, groups: Sequence[int]) -> UseRows:
    """Return those patterns that are in some groups, which are numbered from 0 in the result."""
    places = {group: place for place, group in enumerate(groups)}
    if all(group in places for group in rows.groups.present):
        present = tuple(places[group] for group in rows.groups.present)
        groups_there = RowGroups(present, rows.groups.sizes, rows.groups.order, rows.groups.run)
        return dataclasses.replace(rows, groups=groups_there)
    codes = rows.codes.numpy()
    inside = np.flatnonzero(np.isin(codes, groups))
    numbers = torch.from_numpy(np.searchsorted(groups, codes[inside]))
    there = torch.from_numpy(inside).to(rows.values.device)
    values, keys = (of.index_select(0, there) for of in (rows.values, rows.keys))
    return dataclasses.replace(rows, values=values, keys=keys, codes=numbers, groups=RowGroups.of_codes(numbers))


def _add_sums(groups: Sequence[int], into: Sequence[tuple[Tensor, float]], found: Tensor) -> None:
    """Add sums of some groups to totals of all groups, each multiplied by a number."""
    for total, factor in into:
        for group, one in zip(groups, found.unbind(), strict=True):
            total[group].add_(one, alpha=factor)
