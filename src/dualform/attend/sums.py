"""Sums over a layer's patterns that any number of queries can use: of keys by group, and of the parameters' parts.

Computed once for a view and a grouping, and cached. No query is involved.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualform.attend.groups import Grouping, Table
from dualform.attend.questions import Plan, answer_all
from dualform.engine import rebuild
from dualform.engine.answer_cache import AnswerCache
from dualform.engine.jobs import Fold, Job, Pass
from dualform.engine.reading import kept_by_part
from dualform.engine.reducers import GroupShares, KeySums
from dualform.engine.shares import FoldedShares, fold_shares, replayed_parameters
from dualform.engine.source import PatternPart, PatternSource
from dualform.identity.parameter_use import ParameterUse


@dataclass(frozen=True, slots=True)
class LayerSums:
    """The sums of one layer in one view; `like` says where and in which dtype to compute."""

    table: Table
    cache: AnswerCache
    layer: str
    like: Tensor

    @property
    def replayed(self) -> bool:
        """Whether a parameter of this layer was trained by an optimizer that has no coefficients."""
        return bool(replayed_parameters(self.table.run, [self.layer]))

    def plan_keys(self, grouping: Grouping) -> Plan[Tensor]:
        """Plan the sum of keys per group, (G, d_in)."""
        if grouping.kept is not None:
            return grouping.kept.key_sums(self.layer).sums.to(self.like.device)
        what = ("key sums", *self._view(), grouping.parts)
        found = self.cache.find(what)
        if found is None:
            reducer = KeySums(len(grouping.labels), self.table.run.layer(self.layer).d_in)
            (sums,) = yield [Pass(self.layer, self.table, reducer, self.like, groups=grouping)]
            found = self.cache.keep(what, {"sums": sums})
        return found["sums"].to(self.like.device)

    @property
    def shapes(self) -> dict[ParameterUse, tuple[int, ...]]:
        """The shape of each of the layer's parameters, by use."""
        return self.shapes_of(self.table.run, self.layer)

    @staticmethod
    def shapes_of(run: PatternSource, layer: str) -> dict[ParameterUse, tuple[int, ...]]:
        """Return the shape of each of a layer's parameters, by use."""
        return {use: run.description.parameters[use.parameter].shape for use in run.layer(layer).uses}

    def shares(self, grouping: Grouping | None) -> dict[ParameterUse, Tensor]:
        """Return each group's share of each parameter, use -> (G, *shape)."""
        found: dict[ParameterUse, Tensor] = self._answer(self.plan_shares(grouping))
        return found

    def plan_shares(self, grouping: Grouping | None) -> Plan[dict[ParameterUse, Tensor]]:
        """Plan each group's share of each parameter, use -> (G, *shape)."""
        entry = self.table.run.require_values(self.layer)
        if self.table.keeps_shares(self.layer):
            kept = self._kept_shares(grouping)
            return {use: kept[use.name].to(self.like.device) for use in entry.uses}
        what = ("group shares", *self._view(), None if grouping is None else grouping.parts)
        found = self.cache.find(what)
        if found is None:
            found = self.cache.keep(what, (yield from self._plan_computed_shares(grouping)))
        return {use: found[use.name].to(self.like.device) for use in entry.uses}

    def compute_shares(self, grouping: Grouping | None) -> dict[str, Tensor]:
        """Compute `shares`, whether or not they are cached, by one pass; by the name of the use."""
        found: dict[str, Tensor] = self._answer(self._plan_computed_shares(grouping))
        return found

    def _kept_shares(self, grouping: Grouping | None) -> dict[str, Tensor]:
        """Return each group's share of each parameter from those that the run keeps, by the name of the use."""
        kept = self.table.kept_groups(None) if grouping is None else grouping.kept
        assert kept is not None, "the grouping of a layer that keeps shares"
        return {
            use.name: kept.shares(use.parameter, self.layer).shares for use in self.table.run.layer(self.layer).uses
        }

    def _plan_computed_shares(self, grouping: Grouping | None) -> Plan[dict[str, Tensor]]:
        entry = self.table.run.require_values(self.layer)
        if self.table.keeps_shares(self.layer):
            return self._kept_shares(grouping)
        groups = 1 if grouping is None else len(grouping.labels)
        folded = replayed_parameters(self.table.run, [self.layer])
        jobs: list[Job] = [self._fold(grouping, groups=groups)] if folded else []
        if set(entry.parameters.values()) - set(folded):
            reducer = GroupShares(groups, self.shapes)
            jobs.append(Pass(self.layer, self.table, reducer, self.like, groups=grouping, values=True))
        found: dict[str, Tensor] = {}
        for job, result in zip(jobs, (yield jobs), strict=True):
            if isinstance(job, Fold):
                uses = [use for use in entry.uses if use.parameter in folded]
                found |= {use.name: result[use.parameter].shares for use in uses}
            else:
                found |= {use.name: share for use, share in result.items() if use.parameter not in folded}
        return {use.name: found[use.name] for use in entry.uses}

    def _answer(self, plan: Plan[Any]) -> Any:
        return answer_all(self.table.run, self.table.executor, [plan])[0]

    def starts(self) -> dict[ParameterUse, Tensor]:
        """Return each parameter's part that no pattern added, by use: the rest of the start, and Muon's rounding.

        Where the run keeps shares, or was made from checkpoints, what no pattern explains is in it too.
        """
        run, horizon = self.table.run, self.table.horizon
        entry = run.require_values(self.layer)
        if self.table.keeps_shares(self.layer):
            kept = {use: self.table.kept_groups(None).shares(use.parameter) for use in entry.uses}
            fixed = {use: found.start + found.unexplained + found.rounding for use, found in kept.items()}
            return {use: part.to(self.like.device) for use, part in fixed.items()}

        def compute() -> dict[str, Tensor]:
            folded = self.table.executor.run(run, [self._fold(None, groups=0)])[0]
            return {name: found.fixed for name, found in folded.items()}

        replayed = self.cache.get(("starts", self.layer, horizon), compute) if self.replayed else {}
        found = {}
        for use in entry.uses:
            start = replayed.get(use.parameter)
            start = rebuild.start(run, use.parameter, horizon=horizon) if start is None else start
            unexplained = run.unexplained(use.parameter, horizon)
            start = start if unexplained is None else start + unexplained
            found[use] = start.to(self.like.device)
        return found

    def elsewhere(self) -> dict[ParameterUse, Tensor]:
        """Return what patterns of other layers add to the parameters that they share with this one, by use."""
        run = self.table.run
        mine = run.layer(self.layer)
        names = set(mine.parameters.values())
        others = [n for n, e in run.layers.items() if n != self.layer and set(e.parameters.values()) & names]
        if not others:
            return {}
        everywhere = view_parts(self.table, [self.layer, *others])
        here = self.shares(None)
        return {
            use: everywhere[use.parameter].share.to(self.like.device) - here[use][0]
            for use in mine.uses
            if any(use.parameter in run.layer(other).parameters.values() for other in others)
        }

    def _view(self) -> tuple[Any, ...]:
        return (self.layer, self.table.conditions, self.table.horizon)

    def _fold(self, grouping: Grouping | None, *, groups: int) -> Fold[FoldedShares]:
        """Return the fold of this layer's parameters that follows the groups of this view's patterns."""
        table = self.table
        codes_by_part: dict[int, npt.NDArray[np.int64]] = {}
        kept = kept_by_part(table.run, self.layer, horizon=table.horizon, mask=table.mask)
        for part, rows, _, before in kept:
            codes = np.full(part.count(self.layer), -1, dtype=np.int64)
            codes[rows] = 0 if grouping is None else grouping.codes[before : before + len(rows)]
            codes_by_part[part.index] = codes
        by = LayerGroups(self.layer, codes_by_part)
        return fold_shares(table.run, [self.layer], horizon=table.horizon, groups=groups, by=by)


def view_parts(table: Table, layers: Collection[str] | None = None) -> dict[str, rebuild.ParameterParts]:
    """Return start and share of each parameter in a view, from patterns or from the shares that the run keeps.

    Args:
        table: the view.
        layers: the layers whose parameters are wanted; by default all that have values.
    """
    run = table.run
    wanted = run.exact_parameters() if layers is None else [p for n in layers for p in run.layer(n).parameters.values()]
    found = {}
    for name in dict.fromkeys(name for name in run.shared_parameters() if name in wanted):
        kept = table.kept_groups(None).shares(name)
        found[name] = rebuild.ParameterParts(kept.start, kept.shares[0], rest=kept.unexplained + kept.rounding)
    of_patterns = [n for n in rebuild.layers_with_values(run) if layers is None or n in layers]
    return found | (rebuild.parts(run, table, table.executor, layers=of_patterns) if of_patterns else {})


@dataclass(frozen=True, slots=True, eq=False)
class LayerGroups:
    """The groups of one layer's patterns, for a fold; patterns of other layers are in no group."""

    layer: str
    by_part: Mapping[int, npt.NDArray[np.int64]]

    def codes(self, part: PatternPart, layer: str) -> npt.NDArray[np.int64]:
        """Return the group of each pattern of a part and layer, -1 for none."""
        return self.by_part[part.index] if layer == self.layer else np.full(part.count(layer), -1)


def apply_uses(parts: Mapping[ParameterUse, Tensor], queries: Tensor) -> Tensor:
    """Return the output for each query of a layer with these parts of its parameters, (Q, d_out), in float64."""
    wide = queries.double() if queries.is_floating_point() else queries
    found = [use.parameter_map.apply(part.double(), wide) for use, part in parts.items()]
    return torch.stack(found).sum(dim=0)
