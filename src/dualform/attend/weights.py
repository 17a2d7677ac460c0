"""Group weights: each group's share of every parameter, by bins of steps, so that a mask is a subtraction.

They are kept within a budget of memory: the number of bins is what the budget allows, and where not even one share per
group fits, none are kept and every mask takes a pass. Whatever is not a union of kept shares is computed on demand, so
every answer is exact. `plan` says what is kept.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dualform.attend.conditions import Condition
from dualform.attend.groups import Table
from dualform.attend.removal import Removal, split_into_bins
from dualform.attend.sums import LayerSums, view_parts
from dualform.binning import Bins
from dualform.engine import rebuild
from dualform.engine.answer_cache import AnswerCache
from dualform.identity.parameter_use import ParameterUse

MAX_STEP_BINS = 60


@dataclass(frozen=True, slots=True)
class GroupWeightsPlan:
    """What is kept: a share per group and bin of `width` steps; nothing where `bins` is 0."""

    by: tuple[str | Bins, ...]
    groups: tuple[Any, ...]
    bins: int
    width: int
    bytes: int  # that are kept
    budget: int


def make_plan(table: Table, by: Sequence[str | Bins], *, budget: int) -> GroupWeightsPlan:
    """Choose how many bins of steps fit into the budget, 60 at most."""
    run, steps = table.run, max(table.horizon, 1)
    layers = [name for name, entry in run.layers.items() if entry.store != "keys"]
    found: dict[Any, None] = {}
    size = 0
    for layer in layers:
        found |= dict.fromkeys(table.group(layer, list(by)).labels)
        size += sum(4 * torch.Size(shape).numel() for shape in LayerSums.shapes_of(run, layer).values())
    each = len(found) * size  # bytes of one share per group
    # One more: the groups' own shares, summed over the bins.
    most = 1 if run.shared_parameters() else min(MAX_STEP_BINS, steps)  # shares are kept by group, not by step
    bins = min(most, budget // each - 1) if each else 0
    if bins < 1:
        return GroupWeightsPlan(tuple(by), tuple(found), 0, steps, 0, budget)
    width = -(-steps // bins)
    bins = -(-steps // width)
    return GroupWeightsPlan(tuple(by), tuple(found), bins, width, (bins + 1) * each, budget)


@dataclass(frozen=True, slots=True)
class _Cells:
    """One layer's shares: `labels[c]` is the group and the first step of the bin of `shares[name][c]`."""

    labels: tuple[tuple[Any, int], ...]
    shares: Mapping[str, Tensor]  # name of a parameter's use -> (C, *shape) float32
    groups: Mapping[str, Tensor]  # name of a parameter's use -> (G, *shape), summed over the bins
    places: Mapping[Any, int]  # group -> its place in `groups`


class GroupWeights:
    """The group weights of one view. Made by `Memory.group_weights`."""

    def __init__(self, table: Table, cache: AnswerCache, by: Sequence[str | Bins], *, budget: int) -> None:
        self._table = table
        self._cache = cache
        self.plan = make_plan(table, by, budget=budget)
        self.ready = False  # until `prepare` is through, every mask takes a pass of its own

    def prepare(self) -> "GroupWeights":
        """Compute what is kept, unless that has been done; takes one pass."""
        if self.plan.bins:
            _ = self._cells
            self.ready = True
        return self

    def shares(self, layer: str) -> tuple[tuple[Any, ...], dict[ParameterUse, Tensor]] | None:
        """Return the groups of a layer and their shares of each parameter, (G, *shape), if they are kept."""
        if not self.ready or layer not in self._cells:
            return None
        cells = self._cells[layer]
        return tuple(cells.places), {use: cells.groups[use.name] for use in self._table.run.layer(layer).uses}

    def rebuilt(self) -> dict[str, rebuild.ParameterParts]:
        """Return every parameter as start plus all kept shares, in float64."""
        run = self._table.run
        parameters = run.description.parameters
        total = {name: torch.zeros(parameters[name].shape, dtype=torch.float64) for name in run.exact_parameters()}
        for layer, cells in self._cells.items():
            for use in run.layer(layer).uses:
                total[use.parameter] += cells.groups[use.name].double().sum(dim=0)
        return {name: rebuild.ParameterParts(self._starts[name], share) for name, share in total.items()}

    def covered(self, removal: Removal) -> tuple[set[Any], list[int], tuple[Condition, ...]]:
        """Say what of a removal is kept: whole groups, whole bins of steps, and the conditions of all the rest.

        There are no conditions where nothing is left, and no pass is needed then.
        """
        if removal.empty:
            return set(), [], ()
        if not self.ready or (removal.groups and removal.by != self.plan.by):
            return set(), [], _selected(removal)
        whole, pieces = split_into_bins(removal.steps, self.plan.width, self._table.horizon)
        left = dataclasses.replace(removal, groups=(), steps=tuple(pieces))
        if left.empty:
            return set(removal.groups), whole, ()
        whole_bins = dataclasses.replace(
            removal, steps=tuple((first, first + self.plan.width) for first in whole), samples=(), random=0.0
        )
        without = () if whole_bins.empty else (dataclasses.replace(_selected(whole_bins)[0], negated=True),)
        return set(removal.groups), whole, (*_selected(left), *without)

    def removed(self, removal: Removal) -> dict[str, Tensor]:
        """Return the selected patterns' share of every parameter."""
        groups, bins, rest = self.covered(removal)
        run = self._table.run
        parameters = run.description.parameters
        total = {name: torch.zeros(parameters[name].shape) for name in run.exact_parameters()}
        if groups or bins:
            for layer, cells in self._cells.items():
                for use in run.layer(layer).uses:
                    _add(total[use.parameter], cells, use.name, groups, set(bins))
        if rest:
            view = self._table.narrowed(rest)
            for name, part in view_parts(view).items():
                total[name] += part.share.float()
        return total

    def apply(self, final: Mapping[str, Tensor], removal: Removal) -> dict[str, Tensor]:
        """Return the parameters under a mask, given those without one."""
        removed = self.removed(removal)
        masked = {}
        for name, share in removed.items():
            if removal.only:
                weight = share + self._starts[name] if removal.keep_start else share
            else:
                weight = final[name] - share
                weight = weight if removal.keep_start else weight - self._starts[name]
            masked[name] = weight.to(final[name].dtype)
        return masked

    def patterns(self, removal: Removal, layer: str) -> int:
        """Return how many patterns of a layer are selected."""
        if removal.empty:
            return 0
        if not (removal.steps or removal.samples or removal.random):
            grouping = self._table.group(layer, list(removal.by))
            if grouping.kept is not None:
                counts = grouping.kept.key_sums(layer).counts.tolist()
                return sum(n for n, label in zip(counts, grouping.labels, strict=True) if label in removal.groups)
            wanted = {i for i, label in enumerate(grouping.labels) if label in removal.groups}
            return int(sum((grouping.codes == i).sum() for i in wanted))
        view = self._table.narrowed(_selected(removal))
        return view.count(layer)

    def unknown(self, removal: Removal) -> dict[str, int]:
        """Return how many patterns of each layer have no value by which the removal could select them, where any."""
        if removal.empty:
            return {}
        view = self._table.narrowed(_selected(removal))
        counts = {layer: view.unknown(layer) for layer in self._table.run.layers}
        return {layer: count for layer, count in counts.items() if count}

    @cached_property
    def _starts(self) -> dict[str, Tensor]:
        run = self._table.run
        like = torch.empty(0)
        found: dict[str, Tensor] = {}
        for layer, entry in run.layers.items():
            if entry.store != "keys":
                starts = LayerSums(self._table, self._cache, layer, like).starts()
                found |= {use.parameter: start for use, start in starts.items()}
        return found

    @cached_property
    def _cells(self) -> dict[str, _Cells]:
        run = self._table.run
        return {name: self._layer(name) for name, entry in run.layers.items() if entry.store != "keys"}

    def _layer(self, layer: str) -> _Cells:
        sums = LayerSums(self._table, self._cache, layer, torch.empty(0))
        if self._table.keeps_shares(layer):
            return self._kept_layer(layer, sums)
        grouping = self._table.group(layer, [*self.plan.by, Bins("step", self.plan.width)])
        shares = self._cache.get(
            ("group weights", layer, self._table.conditions, self._table.horizon, grouping.parts),
            lambda: {name: share.float() for name, share in sums.compute_shares(grouping).items()},
            budget=self.plan.budget,
        )
        labels = tuple((label[0] if len(label) == 2 else label[:-1], int(label[-1])) for label in grouping.labels)
        places = {group: i for i, group in enumerate(dict.fromkeys(group for group, _ in labels))}
        codes = torch.tensor([places[group] for group, _ in labels], dtype=torch.int64)
        groups = {
            name: torch.zeros(len(places), *share.shape[1:]).index_add_(0, codes, share)
            for name, share in shares.items()
        }
        return _Cells(labels, shares, groups, places)

    def _kept_layer(self, layer: str, sums: LayerSums) -> _Cells:
        """Return the shares that the run keeps of a layer, as the one bin of all steps."""
        grouping = self._table.group(layer, self.plan.by)
        shares = {use.name: share.float() for use, share in sums.shares(grouping).items()}
        labels = tuple((label, 0) for label in grouping.labels)
        return _Cells(labels, shares, shares, {label: i for i, label in enumerate(grouping.labels)})


def _selected(removal: Removal) -> tuple[Condition, ...]:
    """Return the condition of what a removal selects; equality of one column where that is all, which is faster."""
    if removal.steps or removal.random or bool(removal.groups) == bool(removal.samples):
        return (Condition(removal.sql()),)
    if removal.samples:
        return (Condition(None, (("sample", removal.samples),)),)
    plain = len(removal.by) == 1 and isinstance(removal.by[0], str) and None not in removal.groups
    return (Condition(None, ((str(removal.by[0]), removal.groups),)) if plain else Condition(removal.sql()),)


def _add(total: Tensor, cells: _Cells, name: str, groups: set[Any], bins: set[int]) -> None:
    """Add a parameter's shares of whole groups, and of whole bins of the others; `name` is that of the use."""
    for group in groups:
        if group in cells.places:
            total += cells.groups[name][cells.places[group]]
    if bins:
        for c, (group, first) in enumerate(cells.labels):
            if first in bins and group not in groups:
                total += cells.shares[name][c]
