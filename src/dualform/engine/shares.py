"""Follow the shares of a parameter through its steps: the start's, each group's, and that of coarse rounding.

Each share moves by the linear map of every step, with its own gradient alone: parameter = start + shares. Only as many
matrices are held as there are shares. Where the optimizer rounds more coarsely than the parameter's dtype (Muon), what
a step did beyond its linear map is followed as one more share: parameter = start + shares + rounding.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualform.engine.jobs import Fold
from dualform.engine.parameter_steps import Following, GroupsByPart, RetakenStep, SettingsRow
from dualform.engine.reading import PartMask
from dualform.engine.source import PatternPart, PatternSource
from dualform.engine.stored_calls import StoredCall
from dualform.identity.families.optimizer_kind import StepMap
from dualform.identity.families.optimizer_replay import OptimizerReplay, Share
from dualform.identity.families.rounding import machine
from dualform.identity.parameter_use import ParameterUse
from dualform.recording.sinks import RESIDUAL


@dataclass(frozen=True, slots=True)
class Rounding:
    """The third term of a parameter: what coarse rounding left of all steps, beyond their linear maps.

    Attributes:
        term: the term, float64.
        expected: the size that it should have at random.
        parameter: the parameter as the replay left it.
        repeatable: whether the replay rounds as the live steps did: the same machine, whole patterns, and gradients
            that were not rescaled. Elsewhere the term is that of another rounding of the same steps.
    """

    term: Tensor
    expected: float
    parameter: Tensor
    repeatable: bool


@dataclass(frozen=True, slots=True)
class FoldedShares:
    """One parameter after its steps were taken again.

    Attributes:
        start: what is left of the start, float64.
        shares: (G, ...) each group's share, float64.
        rounding: the third term, where there is one.
        parameter: the parameter itself, as torch's own steps on the rebuilt gradients left it.
        state: the optimizer's state.
        noise: the size of what coarsely rounded gradients did beyond their patterns, at random.
    """

    start: Tensor
    shares: Tensor
    rounding: Rounding | None
    parameter: Tensor
    state: Mapping[str, Any]
    noise: float = 0.0

    @property
    def fixed(self) -> Tensor:
        """What no pattern adds, and every view keeps: start and rounding."""
        return self.start if self.rounding is None else self.start + self.rounding.term


def replayed_parameters(source: PatternSource, layers: Collection[str]) -> tuple[str, ...]:
    """Return the parameters of these layers whose optimizer has no coefficients, so that they need a fold."""
    names = dict.fromkeys(p for layer in layers for p in source.layer(layer).parameters.values())
    return tuple(name for name in names if source.is_replayed(name))


@dataclass(frozen=True, slots=True, eq=False)
class MaskGroup:
    """The grouping whose only group is the patterns that a mask keeps."""

    mask: PartMask

    def codes(self, part: PatternPart, layer: str) -> npt.NDArray[np.int64] | None:
        """Return 0 for each kept pattern of a part and layer and -1 for the others; None if all are kept."""
        kept = self.mask(part, layer)
        return None if kept is None else np.where(kept, 0, -1)


@dataclass(frozen=True, slots=True)
class SharesOf:
    """Follow the start's share and those of so many groups of patterns; with 0 groups the start's alone."""

    groups: int

    def start(self, replay: OptimizerReplay, groups: GroupsByPart | None) -> "_FollowingShares":
        """Return the following of one parameter."""
        return _FollowingShares(replay, self.groups, groups)


def fold_shares(
    source: PatternSource, layers: Collection[str], *, horizon: int, groups: int, by: GroupsByPart | None = None
) -> Fold[FoldedShares]:
    """Return the fold that finds the shares of all parameters of these layers that need one.

    Args:
        source: the source of the patterns.
        layers: the layers whose parameters are wanted. All layers that share one of them are read.
        horizon: how many steps.
        groups: how many groups of patterns to follow; 0 for the start alone.
        by: the group of each pattern; by default all are in group 0.
    """
    return Fold(replayed_parameters(source, layers), horizon, SharesOf(groups), by)


class _FollowingShares(Following[FoldedShares]):
    """The shares of one parameter on its way through the steps."""

    def __init__(self, replay: OptimizerReplay, groups: int, by: GroupsByPart | None) -> None:
        self._replay = replay
        self._groups_of = GroupsOfCalls(by)
        self._shape = replay.parameter.shape
        self._start = replay.share()
        self._shares = [Share(self._zeros()) for _ in range(groups)]
        self._rounding = Share(self._zeros()) if replay.kind.rounds else None
        self._expected = self._noise = 0.0
        self._repeatable = True
        self._parts: list[Tensor | None] = []  # each group's gradient in the step that comes next
        self._exact = self._zeros()  # the gradient in that step, without rounding
        self._before: Share | None = None
        self._was: Tensor | None = None

    def _zeros(self) -> Tensor:
        return torch.zeros(self._shape, dtype=torch.float64)

    def before_step(self, row: SettingsRow) -> None:
        """Keep what the parameter is before the step, where its rounding or its noise is followed."""
        self._parts = [None for _ in self._shares]
        if self._rounding is not None:
            self._exact = self._zeros()
            self._before = self._replay.share()
        self._was = self._replay.parameter.detach().clone() if RESIDUAL in row else None

    def add_call(self, call: StoredCall, use: ParameterUse, gradient: Tensor, factor: float) -> None:
        """Add a call's gradient to those of its groups."""
        if self._rounding is not None:
            gradient = call.exact(use, self._shape)
            self._exact = self._exact + gradient * factor
        if not self._shares:
            return
        for code, part in self._by_group(call, use, gradient):
            scaled = part.double().reshape(self._shape) * factor
            earlier = self._parts[code]
            self._parts[code] = scaled if earlier is None else earlier + scaled

    def _by_group(self, call: StoredCall, use: ParameterUse, whole: Tensor) -> list[tuple[int, Tensor]]:
        """Return the groups that a call's patterns are in, each with its part of the call's gradient."""
        mine = self._groups_of.of(call)
        if mine is None:
            return [(0, whole)]
        present = [code for code in mine.unique().tolist() if code >= 0]
        if len(present) == 1 and bool((mine >= 0).all()):
            return [(present[0], whole)]
        members = []
        for code in present:
            rows = mine == code
            if self._rounding is None:
                part = use.parameter_map.gradient(call.values[rows], call.keys[rows], whole.shape)
            else:
                part = call.exact(use, whole.shape, rows)
            members.append((code, part))
        return members

    def after_step(self, taken: RetakenStep) -> None:
        """Let every share follow the step."""
        if self._was is not None and (size := float(taken.gradient.double().norm())):
            moved = float((self._replay.parameter.detach() - self._was).double().norm())
            self._noise = math.hypot(self._noise, moved * taken.row[RESIDUAL] / size)
        self._start.step(taken.linear, None)
        for share, part in zip(self._shares, self._parts, strict=True):
            share.step(taken.linear, part)
        if self._rounding is not None and self._before is not None:
            self._round(self._rounding, taken.linear, self._before)
            factors = [float(taken.factors[micro]) for micro in {call.micro for call, _ in taken.calls}]
            self._repeatable &= taken.row.get("machine") == machine(taken.gradient.device)
            self._repeatable &= all(factor in (0.0, 1.0) for factor in factors)
            self._repeatable &= all(call.whole for call, _ in taken.calls)

    def _round(self, rounding: Share, linear: StepMap, moved: Share) -> None:
        """Let the rounding so far follow a step, and add what the step did beyond its linear map."""
        after = self._replay.share()
        moved.step(linear, self._exact)
        rounding.step(linear, None)
        rounding.weight = rounding.weight + (after.weight - moved.weight)
        rounding.average = rounding.average + (after.average - moved.average)
        self._expected = math.hypot(linear.kappa * self._expected, linear.noise)

    def result(self) -> FoldedShares:
        """Return where the parameter and its shares have come to."""
        shares = [share.weight for share in self._shares]
        parameter = self._replay.parameter.detach()
        rounding = None
        if self._rounding is not None:
            rounding = Rounding(self._rounding.weight, self._expected, parameter, self._repeatable)
        return FoldedShares(
            start=self._start.weight,
            shares=torch.stack(shares) if shares else self._start.weight.new_zeros(0, *self._shape),
            rounding=rounding,
            parameter=parameter,
            state=self._replay.state,
            # The first moment averages over steps, so its norm is at most the gradients' largest: hence the factor 4.
            noise=4 * self._noise,
        )


class GroupsOfCalls:
    """The groups of calls' patterns; those of a part and layer are found once while calls stay in the part."""

    def __init__(self, by: GroupsByPart | None) -> None:
        self._by = by
        self._known: tuple[int, dict[str, npt.NDArray[np.int64] | None]] = (-1, {})  # of one part, by layer

    def of(self, call: StoredCall) -> Tensor | None:
        """Return the group of each pattern of a call, (n,), -1 for none; None if all are in group 0."""
        if self._by is None:
            return None
        if self._known[0] != call.part.index:
            self._known = (call.part.index, {})
        known = self._known[1]
        if call.layer not in known:
            known[call.layer] = self._by.codes(call.part, call.layer)
        codes = known[call.layer]
        return None if codes is None else torch.from_numpy(np.ascontiguousarray(codes[call.rows]))
