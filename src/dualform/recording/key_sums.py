"""The sums of a recording's keys by group, the groups' numbers of patterns, and the lowest key of each layer."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.identity.grouped_products import RowGroups, sum_unsorted_by_group
from dualform.identity.parameter_use import takes_ids
from dualform.recording.packing import NumbersUnderWay
from dualform.recording.sinks import LayerStart


@dataclass(slots=True)
class _KeySum:
    """The keys of one layer by group in one grouping."""

    sums: Tensor  # (G, d_in) float64
    counts: list[int]  # (G,)

    def grow(self, groups: int) -> None:
        """Make room for so many groups."""
        if groups > len(self.sums):
            more = groups - len(self.sums)
            self.sums = torch.cat([self.sums, self.sums.new_zeros(more, self.sums.shape[1])])
            self.counts += [0] * more


class KeySums:
    """The keys of all layers by group: what is said of them beside the shares."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, str], _KeySum] = {}  # by grouping and layer
        self._found: list[tuple[_KeySum, RowGroups, Tensor]] = []  # of the step that is folded
        self._lowest: dict[str, Tensor] = {}
        self._negative: set[str] = set()  # layers that are known to have had a negative key: nothing is lower than that
        self._lowest_under_way: tuple[list[str], NumbersUnderWay] | None = None

    def count(self, grouping: int, name: str, layer: LayerStart, groups: RowGroups, known: int, keys: Tensor) -> None:
        """Count the keys of a call by group, of which `known` are known; their sums wait for `add`."""
        if not groups.present:
            return
        at = (grouping, name)
        if at not in self._sums:
            zeros = torch.zeros(0, layer.d_in, dtype=torch.float64, device=keys.device)
            self._sums[at] = _KeySum(zeros, [])
        total = self._sums[at]
        total.grow(known)
        if total.sums.device != keys.device:  # a resumed recording begins on the CPU
            total.sums = total.sums.to(keys.device)
        for group, size in zip(groups.present, groups.sizes, strict=True):
            total.counts[group] += size
        if not takes_ids(layer.uses):  # a sum of places in a table says nothing
            found = sum_unsorted_by_group(keys, groups, torch.float64 if keys.dtype == torch.float64 else torch.float32)
            self._found.append((total, groups, found))
        if not grouping and name not in self._negative:
            lowest, earlier = keys.min(), self._lowest.get(name)
            self._lowest[name] = lowest if earlier is None else torch.minimum(lowest, earlier.to(lowest))

    def add(self) -> None:
        """Add the sums of the calls that were counted since the last time, (n, d_in), to those of all groups."""
        whole: dict[int, tuple[Tensor, Tensor]] = {}  # by sum: a kernel for many tensors may write to each of them once
        for total, groups, found in self._found:
            if len(groups.present) == len(total.counts) and id(total) not in whole:
                whole[id(total)] = total.sums, found
            else:
                total.sums.index_add_(0, groups.places(found.device), found.double())
        if whole:
            torch._foreach_add_([sums for sums, _ in whole.values()], [found for _, found in whole.values()])
        self._found = []

    def find_negative(self) -> None:
        """Find the layers whose keys have been negative by the last step; on a GPU by the last but one."""
        if self._lowest_under_way is not None:
            names, numbers = self._lowest_under_way
            lowest = numbers.read()
            self._negative.update(name for name, one in zip(names, lowest, strict=True) if float(one) < 0)
            self._lowest_under_way = None
        names = [name for name in self._lowest if name not in self._negative]
        if names and len({self._lowest[name].device for name in names}) == 1:
            self._lowest_under_way = names, NumbersUnderWay([self._lowest[name].double() for name in names])

    def result(self, places: Mapping[str, int], known: list[int]) -> dict[str, Tensor]:
        """Return sums, counts and lowest keys as tensors by name.

        Args:
            places: the number of each layer.
            known: how many groups each grouping has.
        """
        found: dict[str, Tensor] = {}
        for (grouping, layer), total in self._sums.items():
            total.grow(known[grouping])
            found[f"keys.{grouping}.{places[layer]}"] = total.sums
            found[f"counts.{grouping}.{places[layer]}"] = torch.tensor(total.counts, dtype=torch.int64)
        return found | {f"lowest.{places[layer]}": lowest.double() for layer, lowest in self._lowest.items()}

    def load(self, tensors: Mapping[str, Tensor], places: Mapping[str, int], groupings: int) -> None:
        """Go on from the tensors that `result` gave."""
        for name, place in places.items():
            for grouping in range(groupings):
                if f"keys.{grouping}.{place}" in tensors:
                    sums, counts = (tensors[f"{what}.{grouping}.{place}"].clone() for what in ("keys", "counts"))
                    self._sums[grouping, name] = _KeySum(sums, counts.tolist())
            if f"lowest.{place}" in tensors:
                self._lowest[name] = tensors[f"lowest.{place}"].clone()
