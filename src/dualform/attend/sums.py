"""Sums over a layer's patterns that any number of queries can use: of keys by group, and of the parameters' parts.

Computed once for a view and a grouping, and cached. No query is involved.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualform.attend.cache import Cache
from dualform.attend.groups import Grouping, Table
from dualform.engine import rebuild
from dualform.engine.jobs import Pass
from dualform.engine.reading import kept_by_part
from dualform.engine.reducers import GroupShares, KeySums
from dualform.engine.replay import Replayed, replay, replayed_parameters
from dualform.engine.source import PatternSource
from dualform.forms import form


@dataclass(frozen=True, slots=True)
class LayerSums:
    """The sums of one layer in one view; `like` says where and in which dtype to compute."""

    table: Table
    cache: Cache
    layer: str
    like: Tensor

    @property
    def replayed(self) -> bool:
        """Whether a parameter of this layer was trained by an optimizer that has no coefficients."""
        return bool(replayed_parameters(self.table.run, [self.layer]))

    def keys(self, grouping: Grouping) -> Tensor:
        """Return the sum of keys per group, (G, d_in)."""

        def compute() -> dict[str, Tensor]:
            reducer = KeySums(len(grouping.labels), self.table.run.layer(self.layer).d_in)
            job = Pass(self.layer, self.table, reducer, self.like, groups=grouping)
            return {"sums": self.table.answer(job)}

        return self.cache.get(("key sums", *self._view(), grouping.parts), compute)["sums"].to(self.like.device)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each of the layer's parameters, by role."""
        return self.shapes_of(self.table.run, self.layer)

    @staticmethod
    def shapes_of(run: PatternSource, layer: str) -> dict[str, tuple[int, ...]]:
        """Return the shape of each of a layer's parameters, by role."""
        return {role: run.description.parameters[p].shape for role, p in run.layer(layer).parameters.items()}

    def shares(self, grouping: Grouping | None) -> dict[str, Tensor]:
        """Return each group's share of each parameter, role -> (G, *shape)."""
        self.table.run.require_values(self.layer)
        parts = None if grouping is None else grouping.parts
        found = self.cache.get(("group shares", *self._view(), parts), lambda: self.compute_shares(grouping))
        return {role: share.to(self.like.device) for role, share in found.items()}

    def compute_shares(self, grouping: Grouping | None) -> dict[str, Tensor]:
        """Compute `shares`, whether or not they are cached, by one pass."""
        entry = self.table.run.require_values(self.layer)
        groups = 1 if grouping is None else len(grouping.labels)
        reducer = GroupShares(groups, self.shapes)
        if all(self.table.run.is_replayed(name) for name in entry.parameters.values()):
            found = reducer.new(self.like)
        else:
            job = Pass(self.layer, self.table, reducer, self.like, groups=grouping, values=True)
            found = self.table.answer(job)
        if self.replayed:
            replayed = self._replay(grouping, groups=groups)
            found |= {role: replayed[name].shares for role, name in entry.parameters.items() if name in replayed}
        return found

    def starts(self) -> dict[str, Tensor]:
        """Return what no pattern adds to weight and bias, by role: what is left of the start (and Muon's rounding)."""
        run, horizon = self.table.run, self.table.horizon
        entry = run.require_values(self.layer)

        def compute() -> dict[str, Tensor]:
            return {name: found.fixed for name, found in self._replay(None, groups=0).items()}

        replayed = self.cache.get(("starts", self.layer, horizon), compute) if self.replayed else {}
        return {
            role: (replayed[name] if name in replayed else rebuild.start(run, name, horizon=horizon)).to(
                self.like.device
            )
            for role, name in entry.parameters.items()
        }

    def elsewhere(self) -> dict[str, Tensor]:
        """Return what patterns of other layers add to parameters that they share with this one, by role."""
        run = self.table.run
        mine = {name: role for role, name in run.layer(self.layer).parameters.items()}
        others = [n for n, e in run.layers.items() if n != self.layer and set(e.parameters.values()) & set(mine)]
        if not others:
            return {}
        everywhere = rebuild.parts(run, self.table, self.table.executor, layers=[self.layer, *others])
        here = self.shares(None)
        return {
            role: everywhere[name].share.to(self.like.device) - here[role][0]
            for name, role in mine.items()
            if any(name in run.layer(other).parameters.values() for other in others)
        }

    def _view(self) -> tuple[Any, ...]:
        return (self.layer, self.table.conditions, self.table.horizon)

    def _replay(self, grouping: Grouping | None, *, groups: int) -> dict[str, Replayed]:
        """Replay this layer's parameters, following the groups of this view's patterns."""
        table = self.table
        places: dict[int, npt.NDArray[np.int64]] = {}
        kept = kept_by_part(table.run, self.layer, horizon=table.horizon, mask=table.mask)
        for part, rows, _, before in kept:
            codes = np.full(part.count(self.layer), -1, dtype=np.int64)
            codes[rows] = 0 if grouping is None else grouping.codes[before : before + len(rows)]
            places[part.index] = codes
        return replay(
            table.run,
            [self.layer],
            horizon=table.horizon,
            groups=groups,
            codes=lambda part, layer: places[part.index],
            contributing=[self.layer],
        )


def respond(parts: Mapping[str, Tensor], queries: Tensor) -> Tensor:
    """Return what parts of a layer's parameters, by role, give together, (Q, d_out), in float64."""
    wide = queries.double() if queries.is_floating_point() else queries
    found = [form(role).respond(part.double(), wide) for role, part in parts.items()]
    return torch.stack(found).sum(dim=0)
