"""Shares by group that several processes keep, each of its own patterns: they are summed when they are asked for.

A step's map is the same in all processes and linear in the gradient, so the fold of all patterns is the sum of the
processes' folds. What is left of the start, rounding, and what all gradients together made are the same in all
processes, and process 0 keeps them.

Where processes have rows of the parameters, each has folded everything of its own rows, of the patterns of all
processes: rows are put together, and nothing is summed but keys.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dualform.binning import label_order
from dualform.engine.share_source import GroupKeySums, ParameterShares, ShareSource
from dualform.errors import CorruptError
from dualform.recording.group_labels import label_mark
from dualform.store.stored_shares import StoredShares

if TYPE_CHECKING:
    from dualform.store.reader import Run


class JoinedShares(ShareSource):
    """The shares by group of a run that several processes recorded."""

    def __init__(self, run: "Run", each: Sequence[StoredShares]) -> None:
        """Join the shares of a run's processes, in the order of ranks."""
        self._run = run
        self._each = each

    @property
    def groupings(self) -> tuple[tuple[str, ...], ...]:
        """The groupings that are kept, each as the names of its columns."""
        return self._each[0].groupings

    @property
    def horizons(self) -> tuple[int, ...]:
        """After how many steps all processes keep shares, ascending."""
        return self._each[0].horizons

    def labels(self, by: tuple[str, ...]) -> tuple[Any, ...]:
        """Return the groups of a grouping in all processes, sorted."""
        found = {label_mark(label): label for one in self._each for label in one.labels(by)}
        return tuple(sorted(found.values(), key=label_order))

    def shares(
        self, parameter: str, by: tuple[str, ...], *, layer: str | None = None, horizon: int | None = None
    ) -> ParameterShares:
        """Return a parameter's shares; those of one layer's patterns alone where several layers use it."""
        step = self._run.steps if horizon is None else horizon
        first = self._each[0].shares(parameter, by, layer=layer, horizon=step)
        unexplained = first.unexplained.double()  # process 0 explains its own patterns
        parts = [first.shares]
        for one in self._each[1:]:
            parts.append(one.shares_of(parameter, by, layer, step))
            unexplained = unexplained - one.explained(parameter, horizon=step)
        return ParameterShares(
            self.labels(by),
            self._summed(by, parts),
            first.start,
            unexplained,
            first.rounding,
        )

    def _summed(self, by: tuple[str, ...], parts: Sequence[Tensor]) -> Tensor:
        """Return the sum of what processes have of each group, (groups, ...); of floating-point numbers in float64.

        Shares of a bias whose true gradient is zero may be a million times as large as their sum.
        """
        places = {label_mark(label): place for place, label in enumerate(self.labels(by))}
        dtype = torch.float64 if parts[0].is_floating_point() else parts[0].dtype
        total = torch.zeros(len(places), *parts[0].shape[1:], dtype=dtype)
        for one, part in zip(self._each, parts, strict=True):
            here = torch.tensor([places[label_mark(label)] for label in one.labels(by)], dtype=torch.int64)
            total.index_add_(0, here, part.to(dtype))
        return total

    def key_sums(self, layer: str, by: tuple[str, ...], *, horizon: int | None = None) -> GroupKeySums:
        """Return a layer's key sums by group."""
        step = self._run.steps if horizon is None else horizon
        each = [one.key_sums(layer, by, horizon=step) for one in self._each]
        return GroupKeySums(
            self.labels(by),
            self._summed(by, [one.sums for one in each]),
            self._summed(by, [one.counts for one in each]),
            min(one.lowest for one in each),
        )

    def stored_bytes(self, layer: str) -> int:
        """Return how many bytes the shares of a layer take in all processes."""
        return sum(one.stored_bytes(layer) for one in self._each)

    def expected_noise(self, parameter: str, *, horizon: int | None = None) -> float:
        """Return the size that the optimizer's own coarse rounding is expected to have in a parameter."""
        return self._each[0].expected_noise(parameter, horizon=horizon)

    def gradient_spread(self, parameter: str, *, horizon: int | None = None) -> Tensor | None:
        """Return how far rounding of the gradients may have carried each element of a parameter; None if unknown.

        Each process follows the rounding of its own patterns; that of their sum is at most the sum.
        """
        step = self._run.steps if horizon is None else horizon
        found = [one.gradient_spread(parameter, horizon=step) for one in self._each]
        known = [spread for spread in found if spread is not None]
        return torch.stack(known).sum(0) if known else None


class JoinedRows(JoinedShares):
    """The shares by group of a run whose processes had rows of the parameters."""

    def shares(
        self, parameter: str, by: tuple[str, ...], *, layer: str | None = None, horizon: int | None = None
    ) -> ParameterShares:
        """Return a parameter's shares; those of one layer's patterns alone where several layers use it."""
        step = self._run.steps if horizon is None else horizon
        self._check_numbers(by)
        each = [one.shares(parameter, by, layer=layer, horizon=step) for one in self._each]
        labels = self.labels(by)
        places = {label_mark(label): place for place, label in enumerate(labels)}
        rows = []
        for one in each:  # a process that was killed may not have published the last groups
            here = torch.tensor([places[label_mark(label)] for label in one.labels], dtype=torch.int64)
            all_groups = one.shares.new_zeros(len(labels), *one.shares.shape[1:])
            rows.append(all_groups.index_copy_(0, here, one.shares))
        return ParameterShares(
            labels,
            torch.cat(rows, dim=1),
            torch.cat([one.start for one in each]),
            torch.cat([one.unexplained for one in each]),
            torch.cat([one.rounding for one in each]),
        )

    def _check_numbers(self, by: tuple[str, ...]) -> None:
        """Raise `CorruptError` where processes number groups differently, so that their rows do not belong together."""
        numbered = [[label_mark(label) for label in one.numbered_labels(by)] for one in self._each]
        most = max(numbered, key=len)
        if any(labels != most[: len(labels)] for labels in numbered):
            raise CorruptError(
                f"{self._run.name}: its processes keep shares of different groups by {', '.join(by)}. Restore the "
                "run's files from one copy."
            )

    def gradient_spread(self, parameter: str, *, horizon: int | None = None) -> Tensor | None:
        """Return how far rounding of the gradients may have carried each element of a parameter; None if unknown."""
        step = self._run.steps if horizon is None else horizon
        found = [one.gradient_spread(parameter, horizon=step) for one in self._each]
        known = [spread for spread in found if spread is not None]
        return torch.cat(known) if len(known) == len(found) else None
