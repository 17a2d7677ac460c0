"""The gradients of a parameter by group: what each group of patterns adds to it, at the cost of one weight gradient.

Rows of one group lie together (`RowGroups` sorts them once for a call), so that each group's part is a product over a
slice. Products are computed in the dtype of the rows and summed in at least float32.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from dualform.identity.parameter_maps import BiasMap, OuterMap, ParameterMap, RowsMap, ScaleMap

MAX_PADDING = 1.25
"""Largest group over mean group, above which groups on a GPU are multiplied one by one and not as a padded batch."""
MIN_RUN = 16
"""Neighbouring rows of one group from which they are summed as they lie, and not by a product with a matrix."""
MAX_BATCHED_PRODUCTS = 1 << 22
"""Multiplications of one group up to which a CPU multiplies groups of one size as a batch: a call takes longer."""


@dataclass(frozen=True, eq=False)
class RowGroups:
    """The groups that the patterns of a call are in, and the order that puts each group's patterns together.

    Attributes:
        present: the groups that there are, ascending.
        sizes: how many patterns each of them has.
        order: (T,) the pattern at each place once they are sorted by group, on the CPU; None where they lie so already.
        run: how many neighbouring patterns are in one group, everywhere: the tokens of a sequence, for example.
    """

    present: tuple[int, ...]
    sizes: tuple[int, ...]
    order: Tensor | None = None
    run: int = 1
    _there: dict[tuple[str, torch.device, torch.dtype], Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def of_codes(cls, codes: Tensor) -> "RowGroups":
        """Return the groups of patterns whose groups are given, (T,) int64 on the CPU."""
        numbers = codes.numpy()  # whose functions wake no other thread
        if not len(numbers):
            return cls((), ())
        counts = np.bincount(numbers)
        present = np.flatnonzero(counts)
        sizes = tuple(counts[present].tolist())
        changes = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
        run = math.gcd(len(numbers), *np.unique(np.diff(changes, prepend=0)).tolist())
        ordered = len(changes) == len(present) - 1 and bool((np.diff(numbers[changes], prepend=numbers[0]) >= 0).all())
        narrow = numbers.astype(np.int16) if len(counts) < 1 << 15 else numbers  # sorted in linear time
        order = None if ordered else torch.from_numpy(narrow.argsort(kind="stable"))
        return cls(tuple(present.tolist()), sizes, order, run)

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """Where each group's patterns lie once they are sorted."""
        ends = list(accumulate(self.sizes))
        return tuple(slice(end - size, end) for end, size in zip(ends, self.sizes, strict=True))

    def sort(self, rows: Tensor) -> Tensor:
        """Return rows, (T, d), sorted by group; the rows themselves where they lie so already."""
        if self.order is None:
            return rows
        order = self.order
        return rows.index_select(0, self._kept("order", rows.device, torch.int64, lambda: order))

    def members(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the matrix (n, T) that sums sorted rows by group."""
        return self._kept("members", device, dtype, lambda: _one_hot(len(self.sizes), self.of_rows(device)))

    def members_as_they_lie(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the matrix (n, T) that sums rows by group which are not sorted."""
        return self.members(device, dtype) if self.order is None else self.members_of(None, device, dtype)

    def members_of(self, count: int | None, device: torch.device, dtype: torch.dtype, *, run: int = 1) -> Tensor:
        """Return the matrix that sums unsorted rows, or sums over their runs, by group.

        Args:
            count: of how many groups, absent ones too, (count, T / run); None for those present, (n, T / run).
            device: where it is wanted.
            dtype: what it is wanted in.
            run: how many neighbouring rows are summed already; divides the attribute of that name.
        """

        def make() -> Tensor:
            places = self._places_as_they_lie[::run]
            if count is not None:
                places = torch.tensor(self.present)[places]
            there = self._kept(f"places of {count}, {run}", device, torch.int64, lambda: places)
            return _one_hot(len(self.present) if count is None else count, there)

        return self._kept(f"members of {count}, {run}", device, dtype, make)

    def sort_padded(self, rows: Tensor, *, zeros: bool) -> Tensor:
        """Return rows, (T, d), by group, (n, largest, d): groups that are smaller are filled up, with zeros if asked.

        Without `zeros` the rows that fill a group up are others of the same tensor, so they are finite where it is.
        """
        largest = max(self.sizes)
        if largest * len(self.sizes) == len(rows):
            return self.sort(rows).view(len(self.sizes), largest, -1)
        where = self._kept("padded", rows.device, torch.int64, lambda: self._padded)
        found = rows.index_select(0, where.clamp(min=0)).view(len(self.sizes), largest, -1)
        return found.masked_fill_((where < 0).view(len(self.sizes), largest, 1), 0) if zeros else found

    @cached_property
    def _padded(self) -> Tensor:
        """The row at each place of the padded groups, (n · largest,); -1 where a group is filled up."""
        order = torch.arange(sum(self.sizes)) if self.order is None else self.order
        found = torch.full((len(self.sizes), max(self.sizes)), -1)
        for place, part in enumerate(self.slices):
            found[place, : self.sizes[place]] = order[part]
        return found.view(-1)

    @cached_property
    def _places_as_they_lie(self) -> Tensor:
        """For each unsorted row the place of its group among those that are present, (T,)."""
        return (
            self._of_rows
            if self.order is None
            else torch.empty_like(self.order).index_copy_(0, self.order, self._of_rows)
        )

    def of_rows(self, device: torch.device) -> Tensor:
        """Return for each sorted row the place of its group among those that are present, (T,)."""
        return self._kept("of rows", device, torch.int64, lambda: self._of_rows)

    def places_of_rows(self, device: torch.device) -> Tensor:
        """Return for each row, as the rows lie, its place once they are sorted, (T,)."""

        def make() -> Tensor:
            everything = torch.arange(sum(self.sizes))
            return (
                everything
                if self.order is None
                else torch.empty_like(everything).index_copy_(0, self.order, everything)
            )

        return self._kept("places of rows", device, torch.int64, make)

    def places(self, device: torch.device) -> Tensor:
        """Return the groups that are present, (n,)."""
        return self._kept("places", device, torch.int64, lambda: torch.tensor(self.present))

    @cached_property
    def _of_rows(self) -> Tensor:
        return torch.from_numpy(np.repeat(np.arange(len(self.sizes)), self.sizes))

    def _kept(self, what: str, device: torch.device, dtype: torch.dtype, make: Callable[[], Tensor]) -> Tensor:
        """Return a tensor on a device, made once: all layers of a step have the same groups."""
        at = (what, device, dtype)
        if at not in self._there:
            made = make()
            if device.type == "cuda" and made.device.type == "cpu":
                made = made.pin_memory()  # from other memory a copy would wait for the device
            self._there[at] = made.to(device=device, dtype=dtype, non_blocking=True)
        return self._there[at]


def _one_hot(count: int, places: Tensor) -> Tensor:
    """Return the matrix (count, T) that is true where a row's place is the matrix row's number."""
    return torch.arange(count, device=places.device)[:, None] == places


def sum_by_group(rows: Tensor, groups: RowGroups, dtype: torch.dtype) -> Tensor:
    """Return the sum of each group's sorted rows, (n, d), in a dtype."""
    if len(groups.present) == 1:
        return rows.sum(dim=0, keepdim=True, dtype=dtype)
    return _product(groups.members(rows.device, rows.dtype), rows, dtype)


def sum_unsorted_by_group(rows: Tensor, groups: RowGroups, dtype: torch.dtype) -> Tensor:
    """Return the sum of each group's rows, (n, d), in a dtype, where the rows lie as the call has them."""
    if len(groups.present) == 1:
        return sum_by_group(rows, groups, dtype)
    if groups.run >= MIN_RUN:
        summed = rows.view(-1, groups.run, rows.shape[1]).sum(dim=1, dtype=dtype)
        return groups.members_of(None, rows.device, dtype, run=groups.run) @ summed
    return _product(groups.members_as_they_lie(rows.device, rows.dtype), rows, dtype)


def gradients_by_group(
    parameter_map: ParameterMap,
    values: Tensor,
    keys: Tensor,
    groups: RowGroups,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> list[Tensor]:
    """Return the gradient of each group that is present, in the parameter's shape.

    Args:
        parameter_map: how the parameter is made of patterns.
        values: (T, d_out) sorted by group.
        keys: (T, d_in) sorted by group.
        groups: the groups of the patterns.
        shape: the parameter's shape.
        dtype: what the gradients are wanted in.
    """
    count = len(groups.present)
    kind = type(parameter_map)
    if kind is OuterMap:
        found = _outer(values, keys, groups, dtype)
        return found if len(shape) == 2 else [one.reshape(*shape) for one in found]
    if kind is BiasMap:
        return list(sum_by_group(values, groups, dtype).view(count, *shape).unbind())
    if kind is ScaleMap:
        return list(sum_by_group(values.to(dtype) * keys.to(dtype), groups, dtype).view(count, *shape).unbind())
    if kind is RowsMap and count > 1:
        width = shape[-1]
        rows = torch.Size(shape).numel() // width
        of = groups.of_rows(keys.device)
        total = torch.zeros(count * rows, width, dtype=dtype, device=values.device)
        total.index_add_(0, of * rows + keys.reshape(-1), values.to(dtype))
        return list(total.view(count, *shape).unbind())
    wide, wide_keys = values.to(dtype), keys if not keys.is_floating_point() else keys.to(dtype)
    return [parameter_map.gradient(wide[part], wide_keys[part], shape).reshape(*shape) for part in groups.slices]


def add_by_group(
    total: Tensor,
    parameter_map: ParameterMap,
    values: Tensor,
    keys: Tensor,
    groups: RowGroups,
    *,
    keep: float,
    take: float,
) -> None:
    """Replace each group's total by `keep` times itself plus `take` times the gradient of the group's patterns.

    Matrices and biases are multiplied right into the totals, so that no gradient lies in memory beside them.

    Args:
        total: (G, ...) the totals of the groups 0 to G - 1, in the parameter's shape; written to.
        parameter_map: how the parameter is made of patterns.
        values: (T, d_out) in any order.
        keys: (T, d_in) in the same order.
        groups: the groups of the rows.
        keep: what is left of every group's total, also where a group has no pattern here.
        take: what the gradients are multiplied with.
    """
    kind, there = type(parameter_map), total.device == values.device
    if kind is OuterMap and there:
        _add_outer(total.view(len(total), total.shape[1], -1), values, keys, groups, keep=keep, take=take)
    elif kind in (BiasMap, ScaleMap) and there:
        rows = values if kind is BiasMap else values.to(total.dtype) * keys
        if groups.run >= MIN_RUN:
            rows = rows.view(-1, groups.run, rows.shape[1]).sum(dim=1, dtype=total.dtype)
        run = groups.run if groups.run >= MIN_RUN else 1
        members = groups.members_of(total.shape[0], rows.device, rows.dtype, run=run)
        _add_product(total.view(len(total), -1), members, rows, keep=keep, take=take)
    else:
        shape = total.shape[1:]
        found = gradients_by_group(parameter_map, groups.sort(values), groups.sort(keys), groups, shape, total.dtype)
        if keep != 1.0:
            total.mul_(keep)
        for group, one in zip(groups.present, found, strict=True):
            total[group].add_(one if there else one.to(total.device), alpha=take)


def _add_outer(total: Tensor, values: Tensor, keys: Tensor, groups: RowGroups, *, keep: float, take: float) -> None:
    """Replace each total (G, d_out, d_in) by keep · total + take · Eᵀ X of its group."""
    count, largest = len(groups.present), max(groups.sizes, default=0)
    padded = largest * count
    if values.device.type == "cuda":
        batched = padded <= MAX_PADDING * len(values)
    else:
        batched = padded == len(values) and largest * total[0].numel() <= MAX_BATCHED_PRODUCTS
    if count == len(total) and batched:
        left = groups.sort_padded(values, zeros=True).transpose(1, 2)
        _add_product(total, left, groups.sort_padded(keys, zeros=False), keep=keep, take=take)
        return
    values, keys = groups.sort(values), groups.sort(keys)
    parts = dict(zip(groups.present, groups.slices, strict=True))
    for group, mine in enumerate(total.unbind()):
        if group in parts:
            _add_product(mine, values[parts[group]].t(), keys[parts[group]], keep=keep, take=take)
        elif keep != 1.0:
            mine.mul_(keep)


def _add_product(total: Tensor, left: Tensor, right: Tensor, *, keep: float, take: float) -> None:
    """Replace a total by keep · total + take · left @ right: matrices, or batches of them."""
    add = torch.addmm if total.dim() == 2 else torch.baddbmm
    if left.dtype == right.dtype == total.dtype:
        add(total, left, right, beta=keep, alpha=take, out=total)
    elif total.device.type == "cuda" and left.dtype == right.dtype and total.dtype == torch.float32:
        add(total, left, right, out_dtype=torch.float32, beta=keep, alpha=take, out=total)
    else:
        add(total, left.to(total.dtype), right.to(total.dtype), beta=keep, alpha=take, out=total)


def _outer(values: Tensor, keys: Tensor, groups: RowGroups, dtype: torch.dtype) -> list[Tensor]:
    """Return Eᵀ X of sorted rows for each group: on a GPU in one batch where all groups have as many rows."""
    count, largest = len(groups.present), max(groups.sizes, default=0)
    if values.device.type == "cuda" and count > 1 and largest * count == len(values):
        return list(_batched(values.view(count, largest, -1), keys.view(count, largest, -1), dtype).unbind())
    return [_product(values[part].t(), keys[part], dtype) for part in groups.slices]


def _batched(values: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
    if values.dtype == keys.dtype == dtype:
        return torch.bmm(values.transpose(1, 2), keys)
    if values.dtype == keys.dtype and dtype == torch.float32:
        return torch.bmm(values.transpose(1, 2), keys, out_dtype=torch.float32)
    return torch.bmm(values.transpose(1, 2).to(dtype), keys.to(dtype))


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a product of matrices in a dtype; low-precision rows are multiplied as they are where a GPU can."""
    if left.dtype == right.dtype == dtype:
        return left @ right
    if left.device.type == "cuda" and left.dtype == right.dtype and dtype == torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.to(dtype) @ right.to(dtype)
