"""The shares of one parameter of which processes have rows each: every process folds the shares of its own rows.

A process's own patterns give every row of the parameter a gradient, and each row's gradient is the sum over processes.
So a step needs one sum over processes for each group, of which this process gets its rows; everything else goes as in
`ParameterFold`, on these rows alone. The sums are asked for here (`RowSum`) and made elsewhere, for many parameters at
once: nothing in this file knows of processes.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualform.identity.families.optimizer_kind import StepMatrix
from dualform.identity.families.parameter_fold import ParameterFold, UseKey, UseRows, multiply
from dualform.identity.grouped_products import RowGroups, add_by_group

MAX_SUM_BYTES = 32 << 20
"""Bytes of whole gradients that are made for one sum: of as many groups as fit, and of one at the least."""


@dataclass(frozen=True, slots=True)
class RowSum:
    """A sum over processes of tensors of which each process needs its own rows.

    Attributes:
        shape: (n, rows, ...) what each process adds.
        dtype: the dtype of the sum.
        make: returns this process's part, in this shape.
        take: takes this process's rows of the sum, (n, own rows, ...).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]
    take: Callable[[Tensor], None]


class DividedFold(ParameterFold):
    """The parts of one process's rows of a parameter on their way through its live steps.

    Attributes:
        present: use -> the groups that have a pattern in the step that comes next, in any process, ascending; to be set
            before each step.
        sums: what the moves that `step` has returned wait for; whoever makes the sums takes them out.
    """

    def __init__(self, shape: Sequence[int], *, whole: Sequence[int], **settings: Any) -> None:
        """Begin with nothing but the start.

        Args:
            shape: of this process's rows.
            whole: the shape of the whole parameter.
            settings: as `ParameterFold` has them.
        """
        super().__init__(shape, **settings)
        self._whole_shape = tuple(whole)
        self.present: Mapping[UseKey, Sequence[int]] = {}
        self.sums: list[RowSum] = []

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
        for use, groups in self.present.items():
            self.stack(use).see(groups)
            found[use] = [one for one in rows if one.use == use]
        return found

    def _add_gradients(self, total: Tensor, use: UseKey, rows: Sequence[UseRows], *, keep: float, take: float) -> None:
        """Multiply totals by group by `keep`, and ask for the gradients of the step's patterns, `take` times."""
        if keep != 1.0:
            total.mul_(keep)
        self._ask(use, rows, [(total, take)])

    def _wait(self, numbers: StepMatrix, rows: Sequence[UseRows]) -> None:
        """Fold a step whose map is made of numbers: at once, so that what is kept is never behind any process."""
        left = StepMatrix(numbers.weight, numbers.average)
        by_use = self._rows_by_use(rows)
        of_weight, of_average = numbers.gradient
        for use, stack in self.stacks.items():
            groups = self.present.get(use, ())
            for group in stack.seen.difference(groups):
                stack.wait(group, left)
            if of_average or left.average[0]:
                stack.need_average()
            for group in groups:
                stack.catch_up(group)
                multiply(*stack.parts_of(group), left)
            if groups:
                into = [(stack.weight, of_weight)]
                if stack.average is not None:
                    into.append((stack.average, of_average))
                self._ask(use, by_use[use], into)

    def _ask(self, use: UseKey, rows: Sequence[UseRows], into: Sequence[tuple[Tensor, float]]) -> None:
        """Ask for the gradients of a use by group, to be added to totals (G, ...), each multiplied by a number."""
        groups, fitting = self.present.get(use, ()), max(1, MAX_SUM_BYTES // max(1, self._width))
        for begin in range(0, len(groups), fitting):
            some = tuple(groups[begin : begin + fitting])
            shape = (len(some), *self._whole_shape)
            make = partial(self._sum_groups, rows, some)
            self.sums.append(RowSum(shape, self.whole.weight.dtype, make, partial(_add_sums, some, into)))

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
    present = rows.groups.present
    places = {group: place for place, group in enumerate(groups)}
    if all(group in places for group in present):
        numbered = tuple(places[group] for group in present)
        return dataclasses.replace(
            rows, groups=RowGroups(numbered, rows.groups.sizes, rows.groups.order, rows.groups.run)
        )
    codes = rows.codes.numpy()
    inside = np.flatnonzero(np.isin(codes, groups))
    numbers = torch.from_numpy(np.searchsorted(groups, codes[inside]))
    there = torch.from_numpy(inside).to(rows.values.device)
    values, keys = (rows_of.index_select(0, there) for rows_of in (rows.values, rows.keys))
    return dataclasses.replace(rows, values=values, keys=keys, codes=numbers, groups=RowGroups.of_codes(numbers))


def _add_sums(groups: Sequence[int], into: Sequence[tuple[Tensor, float]], found: Tensor) -> None:
    """Add sums of some groups to totals of all groups, each multiplied by a number."""
    for total, factor in into:
        for group, one in zip(groups, found.unbind(), strict=True):
            if factor:
                total[group].add_(one, alpha=factor)
