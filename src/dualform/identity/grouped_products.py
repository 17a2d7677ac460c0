"""The gradients of a parameter by group: what each group of patterns adds to it, at the cost of one weight gradient.

Rows of one group lie together (`RowGroups` sorts them once for a call), so that each group's part is a product over a
slice. Products are computed in the dtype of the rows and summed in at least float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from dualform.identity.parameter_maps import BiasMap, OuterMap, ParameterMap, RowsMap, ScaleMap

MAX_PADDING = 1.25
"""Largest group over mean group, above which groups on a GPU are multiplied one by one and not as a padded batch."""


@dataclass(frozen=True, eq=False)
class RowGroups:
    """The groups that the patterns of a call are in, and the order that puts each group's patterns together.

    Attributes:
        present: the groups that there are, ascending.
        sizes: how many patterns each of them has.
        order: (T,) the pattern at each place once they are sorted by group, on the CPU; None where they lie so already.
    """

    present: tuple[int, ...]
    sizes: tuple[int, ...]
    order: Tensor | None = None
    _there: dict[tuple[str, torch.device, torch.dtype], Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def of_codes(cls, codes: Tensor) -> "RowGroups":
        """Return the groups of patterns whose groups are given, (T,) int64 on the CPU."""
        if not len(codes):
            return cls((), ())
        present, counts = codes.unique(return_counts=True)
        sizes = tuple(counts.tolist())
        ordered = len(present) == 1 or bool((codes[1:] >= codes[:-1]).all())
        return cls(tuple(present.tolist()), sizes, None if ordered else codes.argsort(stable=True))

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
        return self._kept("members", device, dtype, lambda: torch.arange(len(self.sizes))[:, None] == self._of_rows)

    def members_as_they_lie(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the matrix (n, T) that sums rows by group which are not sorted."""
        if self.order is None:
            return self.members(device, dtype)
        order = self.order

        def make() -> Tensor:
            places = torch.empty_like(order).index_copy_(0, order, self._of_rows)
            return torch.arange(len(self.sizes))[:, None] == places

        return self._kept("as they lie", device, dtype, make)

    def of_rows(self, device: torch.device) -> Tensor:
        """Return for each sorted row the place of its group among those that are present, (T,)."""
        return self._kept("of rows", device, torch.int64, lambda: self._of_rows)

    def places(self, device: torch.device) -> Tensor:
        """Return the groups that are present, (n,)."""
        return self._kept("places", device, torch.int64, lambda: torch.tensor(self.present))

    @cached_property
    def _of_rows(self) -> Tensor:
        return torch.arange(len(self.sizes)).repeat_interleave(torch.tensor(self.sizes))

    def _kept(self, what: str, device: torch.device, dtype: torch.dtype, make: Callable[[], Tensor]) -> Tensor:
        """Return a tensor on a device, made once: all layers of a step have the same groups."""
        at = (what, device, dtype)
        if at not in self._there:
            self._there[at] = make().to(device=device, dtype=dtype, non_blocking=True)
        return self._there[at]


def sum_by_group(rows: Tensor, groups: RowGroups, dtype: torch.dtype) -> Tensor:
    """Return the sum of each group's sorted rows, (n, d), in a dtype."""
    if len(groups.present) == 1:
        return rows.sum(dim=0, keepdim=True, dtype=dtype)
    return _product(groups.members(rows.device, rows.dtype), rows, dtype)


def sum_unsorted_by_group(rows: Tensor, groups: RowGroups, dtype: torch.dtype) -> Tensor:
    """Return the sum of each group's rows, (n, d), in a dtype, where the rows lie as the call has them."""
    if len(groups.present) == 1:
        return sum_by_group(rows, groups, dtype)
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


def _outer(values: Tensor, keys: Tensor, groups: RowGroups, dtype: torch.dtype) -> list[Tensor]:
    """Return Eᵀ X for each group: on a GPU in one batch where groups are about as large as each other."""
    count, largest = len(groups.present), max(groups.sizes, default=0)
    if values.device.type != "cuda" or count == 1:
        return [_product(values[part].t(), keys[part], dtype) for part in groups.slices]
    if largest * count == len(values):
        return list(_batched(values.view(count, largest, -1), keys.view(count, largest, -1), dtype).unbind())
    if largest * count > MAX_PADDING * len(values):
        return [_product(values[part].t(), keys[part], dtype) for part in groups.slices]
    padded = [rows.new_zeros(count, largest, rows.shape[1]) for rows in (values, keys)]
    for place, part in enumerate(groups.slices):
        for rows, there in zip((values, keys), padded, strict=True):
            there[place, : groups.sizes[place]] = rows[part]
    return list(_batched(padded[0], padded[1], dtype).unbind())


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
