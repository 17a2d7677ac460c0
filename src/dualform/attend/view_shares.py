"""`ViewShares`: the sums of a view by group, made of its patterns, or taken from the shares that the run keeps.

Patterns are added up by passes, and by folds where the optimizer has no coefficients; kept shares are summed.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dualform.attend.groups import Grouping, Table
from dualform.attend.questions import answer_all
from dualform.attend.sums import LayerSums
from dualform.binning import Bins, label_order
from dualform.engine import rebuild
from dualform.engine.answer_cache import AnswerCache
from dualform.engine.share_source import GroupKeySums, ParameterShares, ShareSource
from dualform.engine.shares import fold_shares
from dualform.errors import SelectionError
from dualform.identity.parameter_use import takes_ids


class ViewShares(ShareSource):
    """The sums of one view, by groupings of its patterns.

    Args:
        table: the view.
        cache: keeps sums that were computed.
        groupings: the columns of each grouping.
    """

    def __init__(self, table: Table, cache: AnswerCache, groupings: Sequence[Sequence[str | Bins]]) -> None:
        self._table = table
        self._cache = cache
        self._columns = {tuple(map(str, columns)): tuple(columns) for columns in groupings}

    @property
    def groupings(self) -> tuple[tuple[str, ...], ...]:
        """The groupings that were asked for."""
        return tuple(self._columns)

    @property
    def horizons(self) -> tuple[int, ...]:
        """Every step up to the view's horizon, where patterns are kept; otherwise those at which shares are."""
        run, last = self._table.run, self._table.horizon
        if run.shared_parameters():
            return tuple(step for step in run.require_shares().horizons if step <= last)
        return tuple(range(last + 1))

    def labels(self, by: tuple[str, ...]) -> tuple[Any, ...]:
        """Return the groups of a grouping that some layer has patterns of."""
        return self._labels(self._table, by, list(self._table.run.layers))

    def shares(
        self, parameter: str, by: tuple[str, ...], *, layer: str | None = None, horizon: int | None = None
    ) -> ParameterShares:
        """Return a parameter's shares, float64; those of one layer's patterns alone where several layers use it."""
        table = self._at(horizon)
        run = table.run
        every = [name for name, entry in run.layers.items() if parameter in entry.parameters.values()]
        labels = self._labels(table, by, list(run.layers))
        place = {label: i for i, label in enumerate(labels)}
        start, unexplained, rounding = self._fixed(table, parameter, every[0])
        total = torch.zeros(len(labels), *start.shape, dtype=torch.float64)
        for name in every if layer is None else [layer]:
            grouping = table.group(name, self._parts(by))
            if not len(grouping.labels):
                continue
            found = LayerSums(table, self._cache, name, torch.empty(0, dtype=table.dtype(name))).shares(grouping)
            places = torch.tensor([place[label] for label in grouping.labels])
            for use, share in found.items():
                if use.parameter == parameter:
                    total.index_add_(0, places, share.double())
        return ParameterShares(labels, total, start, unexplained, rounding)

    def key_sums(self, layer: str, by: tuple[str, ...], *, horizon: int | None = None) -> GroupKeySums:
        """Return a layer's key sums by group; zeros where its keys are no numbers but places in a table."""
        table = self._at(horizon)
        grouping = table.group(layer, self._parts(by))
        if grouping.kept is not None:
            return grouping.kept.key_sums(layer)
        entry, like = table.run.layer(layer), torch.empty(0, dtype=table.dtype(layer))
        sums = torch.zeros(len(grouping.labels), entry.d_in, dtype=torch.float64)
        if not takes_ids(entry.uses) and len(grouping.labels):
            plan = LayerSums(table, self._cache, layer, like).plan_keys(grouping)
            sums = answer_all(table.run, table.executor, [plan])[0].double()
        counts = torch.bincount(torch.from_numpy(grouping.codes), minlength=len(grouping.labels))
        return GroupKeySums(grouping.labels, sums, counts, table.run.key_range(layer)[0])

    def _at(self, horizon: int | None) -> Table:
        """Return the view after so many steps."""
        table = self._table
        if horizon is None or horizon == table.horizon:
            return table
        if horizon not in self.horizons:
            raise SelectionError(f"There are no sums after step {horizon}; there are at {self.horizons}.")
        return Table(table.run, table.conditions, horizon, table.executor)

    def _parts(self, by: tuple[str, ...]) -> tuple[str | Bins, ...]:
        if by not in self._columns:
            raise SelectionError(f"There are no sums by {by}; there are by {', '.join(map(str, self._columns))}.")
        return self._columns[by]

    def _labels(self, table: Table, by: tuple[str, ...], layers: Sequence[str]) -> tuple[Any, ...]:
        groupings: list[Grouping] = [table.group(name, self._parts(by)) for name in layers]
        return tuple(sorted({label for one in groupings for label in one.labels}, key=label_order))

    def _fixed(self, table: Table, parameter: str, layer: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return the three parts of a parameter that are no pattern's: start, unexplained and rounding, float64."""
        run, horizon = table.run, table.horizon
        if parameter in run.shared_parameters():
            kept = table.kept_groups(None).shares(parameter)
            return kept.start, kept.unexplained, kept.rounding
        unexplained = run.unexplained(parameter, horizon)
        if not run.is_replayed(parameter):
            start = rebuild.start(run, parameter, horizon=horizon)
            zeros = torch.zeros_like(start)
            return start, zeros if unexplained is None else unexplained, zeros

        def fold() -> dict[str, Tensor]:
            tensors: dict[str, Tensor] = {}
            for name, found in table.executor.run(run, [fold_shares(run, [layer], horizon=horizon, groups=0)])[
                0
            ].items():
                rounding = torch.zeros_like(found.start) if found.rounding is None else found.rounding.term
                tensors |= {f"{name} start": found.start, f"{name} rounding": rounding}
            return tensors

        parts = self._cache.get(("start and rounding", layer, horizon), fold)
        start, rounding = parts[f"{parameter} start"], parts[f"{parameter} rounding"]
        return start, torch.zeros_like(start) if unexplained is None else unexplained, rounding
