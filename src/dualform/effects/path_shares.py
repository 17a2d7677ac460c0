"""How each group's share of a parameter changes from one look at the path to the next, for path contributions.

An optimizer whose steps are numbers (SGD) is not taken again: the values of many steps are multiplied with what their
steps' gradients have become by now, and one product per group adds all of them. The others follow every step.
"""

import dataclasses
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualform.engine.parameter_steps import Following, GroupsByPart, RetakenStep, SettingsRow
from dualform.engine.shares import GroupsOfCalls
from dualform.engine.source import PatternSource
from dualform.engine.stored_calls import StoredCall
from dualform.identity.families.elementwise_step import ElementwiseStep
from dualform.identity.families.optimizer_kind import Move, StepMap, StepMatrix, follow_together
from dualform.identity.families.optimizer_replay import OptimizerReplay, Share
from dualform.identity.grouped_products import RowGroups, gradients_by_group
from dualform.identity.parameter_use import ParameterUse

PENDING_BYTES = 1 << 28
"""Bytes of keys and values of one parameter after which steps of numbers are followed, to bound what is held."""


@dataclass(frozen=True, slots=True)
class ShareChanges:
    """A parameter after some step, and what changed it since the last look.

    Attributes:
        parameter: the parameter, float64.
        changes: (G + 2, ...) the change of each group's share, of what is left of the start, and of the rest, which is
            rounding. They sum to the change of the parameter.
    """

    parameter: Tensor
    changes: Tensor


@dataclass(frozen=True, slots=True)
class PathShares:
    """Follow the shares of so many groups, to be looked at after any step.

    Attributes:
        groups: how many groups there are.
        decays: whether any step of numbers takes from the parameter itself, so that shares have to be kept for it.
        device: where shares are kept and products are taken.
    """

    groups: int
    decays: bool = True
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))

    def start(self, replay: OptimizerReplay, groups: GroupsByPart | None) -> "PathFollowing":
        """Return the following of one parameter."""
        kind = _ManySteps if replay.kind.has_coefficients else _EveryStep
        return kind(replay, self, groups)


class PathFollowing(Following[Tensor]):
    """What each group, the start and rounding do to one parameter, followed through its steps.

    Shares have the parameter's dtype, at least float32: rounding that they take is part of the rest.
    """

    def __init__(self, replay: OptimizerReplay, settings: PathShares, by: GroupsByPart | None) -> None:
        self._replay = replay
        self._groups = settings.groups
        self._device = settings.device
        self._groups_of = GroupsOfCalls(by)
        self._shape = replay.parameter.shape
        self._dtype = torch.promote_types(replay.parameter.dtype, torch.float32)
        self._parameter = replay.parameter.detach().to(self._device, torch.float64, copy=True)

    @abstractmethod
    def look(self) -> ShareChanges:
        """Return where the parameter has come to, and each change since the last look."""

    def result(self) -> Tensor:
        """Return the parameter as it was at the last look."""
        return self._parameter

    def _codes(self, call: StoredCall) -> Tensor:
        """Return the group of each pattern of a call, (n,), -1 for none."""
        found = self._groups_of.of(call)
        return torch.zeros(len(call.values), dtype=torch.int64) if found is None else found

    def _zeros(self, count: int) -> Tensor:
        return torch.zeros(count, *self._shape, dtype=self._dtype, device=self._device)

    def _there(self, rows: Tensor) -> Tensor:
        """Return rows on the device, numbers in the dtype of the shares."""
        return rows.to(self._device, self._dtype) if rows.is_floating_point() else rows.to(self._device)


class _EveryStep(PathFollowing):
    """Shares that move with every step, by its linear map."""

    def __init__(self, replay: OptimizerReplay, settings: PathShares, by: GroupsByPart | None) -> None:
        super().__init__(replay, settings, by)
        start = replay.share()
        self._weights = self._zeros(self._groups + 1)
        self._averages = self._zeros(self._groups + 1)
        self._weights[-1] = start.weight
        self._averages[-1] = start.average
        self._looked_at = self._weights.clone()
        self._gradients: dict[int, Tensor] = {}  # of the step that comes next, by group

    def before_step(self, row: SettingsRow) -> None:
        self._gradients = {}

    def add_call(self, call: StoredCall, use: ParameterUse, gradient: Tensor, factor: float) -> None:
        groups = RowGroups.of_codes(self._codes(call))
        values, keys = (groups.sort(self._there(rows)) for rows in (call.values, call.keys))
        found = gradients_by_group(use.parameter_map, values, keys, groups, self._shape, self._dtype)
        for group, part in zip(groups.present, found, strict=True):
            if group >= 0:
                scaled = part * factor
                self._gradients[group] = scaled + self._gradients[group] if group in self._gradients else scaled

    def after_step(self, taken: RetakenStep) -> None:
        gradients = [self._gradients.get(group) for group in range(self._groups + 1)]
        linear = taken.linear
        if isinstance(linear, ElementwiseStep):
            linear = step_in_dtype(linear, self._dtype, self._device)
            follow_together([Move(linear, list(self._weights), list(self._averages), gradients)])
            return
        for place, gradient in enumerate(gradients):
            share = Share(self._weights[place].double(), self._averages[place].double())
            share.step(linear, None if gradient is None else gradient.double())
            self._weights[place], self._averages[place] = share.weight, share.average

    def look(self) -> ShareChanges:
        before = self._parameter
        self._parameter = self._replay.parameter.detach().to(self._device, torch.float64, copy=True)
        known = self._weights - self._looked_at
        self._looked_at.copy_(self._weights)
        rest = (self._parameter - before - known.sum(0, dtype=torch.float64)).to(self._dtype)
        return ShareChanges(self._parameter, torch.cat([known, rest[None]]))


def takes_decay(source: PatternSource, parameter: str) -> bool:
    """Say whether any step took weight decay from a parameter."""
    settings = source.facts(parameter)[0].settings
    return "weight_decay" in settings and bool(np.any(np.nan_to_num(np.asarray(settings["weight_decay"], float))))


def step_in_dtype(step: ElementwiseStep, dtype: torch.dtype, device: torch.device) -> ElementwiseStep:
    """Return a step with its matrices in a dtype, on a device."""

    def there(factor: Tensor | float) -> Tensor | float:
        return factor.to(device, dtype) if isinstance(factor, Tensor) else factor

    return dataclasses.replace(
        step, beta=there(step.beta), on_average=there(step.on_average), on_gradient=there(step.on_gradient)
    )


class _ManySteps(PathFollowing):
    """Shares under an optimizer whose steps are numbers: brought up to date only when they are looked at.

    What is held beside the changes is each group's average, and its share where weights decay.
    """

    def __init__(self, replay: OptimizerReplay, settings: PathShares, by: GroupsByPart | None) -> None:
        super().__init__(replay, settings, by)
        start = replay.share()
        self._averages = self._zeros(self._groups + 1)
        self._averages[-1] = start.average
        self._shares: Tensor | None = None  # where there is decay: what is left of the start, and each group's
        if settings.decays:
            self._shares = self._zeros(self._groups + 1)
            self._shares[-1] = start.weight
        self._earlier: Tensor | None = None  # changes since the last look that were followed already
        self._maps: list[StepMatrix] = []  # of the steps that are not followed yet
        self._calls: list[tuple[int, StoredCall, ParameterUse, float, Tensor]] = []  # of those steps, by place in _maps
        self._pending = 0

    def add_step(self, linear: StepMap, calls: Sequence[tuple[StoredCall, ParameterUse, float]]) -> None:
        matrix = linear.matrix
        assert matrix is not None, "an optimizer with coefficients has steps of numbers"
        for call, use, factor in calls:
            self._calls.append((len(self._maps), call, use, factor, self._codes(call)))
            self._pending += call.keys.nbytes + call.values.nbytes
        self._maps.append(matrix)
        if self._pending > PENDING_BYTES:
            changes = self._follow()
            self._earlier = changes if self._earlier is None else self._earlier.add_(changes)

    def after_step(self, taken: RetakenStep) -> None:
        raise AssertionError("steps of numbers are not taken again")

    def look(self) -> ShareChanges:
        changes = self._follow()
        if self._earlier is not None:
            changes += self._earlier
            self._earlier = None
        self._parameter = self._parameter + changes.sum(0, dtype=torch.float64)
        return ShareChanges(self._parameter, changes)

    def _follow(self) -> Tensor:
        """Follow the steps that are not followed yet, and return the changes, (G + 2, ...), of which the last is 0."""
        # What (W, m) and each step's gradient become after the last step: from the last step to the first.
        whole = StepMatrix()
        on_weight, on_average = [0.0] * len(self._maps), [0.0] * len(self._maps)
        for i in range(len(self._maps) - 1, -1, -1):
            whole = whole.after(self._maps[i])
            on_weight[i], on_average[i] = whole.gradient
        changes = self._zeros(self._groups + 2)
        known = changes[:-1]
        torch.mul(self._averages, whole.weight[1], out=known)
        self._averages *= whole.average[1]
        if self._shares is not None:
            known += (whole.weight[0] - 1.0) * self._shares
            self._averages += whole.average[0] * self._shares
        else:
            assert whole.weight[0] == 1.0, "steps without decay leave the parameter as it is"
        for use in dict.fromkeys(use for _, _, use, _, _ in self._calls):
            self._add_products(use, ((known, on_weight), (self._averages, on_average)))
        if self._shares is not None:
            self._shares += known
        self._maps, self._calls, self._pending = [], [], 0
        return changes

    def _add_products(self, use: ParameterUse, totals: Sequence[tuple[Tensor, Sequence[float]]]) -> None:
        """Add the pending patterns' gradients to some totals, each multiplied with its step's number."""
        mine = [(place, call, factor, codes) for place, call, u, factor, codes in self._calls if u == use]
        keys = self._there(torch.cat([call.keys for _, call, _, _ in mine]))
        values = self._there(torch.cat([call.values for _, call, _, _ in mine]))
        steps = torch.repeat_interleave(
            torch.tensor([place for place, *_ in mine]), torch.tensor([len(codes) for *_, codes in mine])
        )
        factors = torch.tensor([factor for _, _, factor, _ in mine], dtype=torch.float64)
        scale = factors.repeat_interleave(torch.tensor([len(codes) for *_, codes in mine]))
        groups = RowGroups.of_codes(torch.cat([codes for *_, codes in mine]))
        keys, values = groups.sort(keys), groups.sort(values)
        for total, numbers in totals:
            if not any(numbers):
                continue
            each = (torch.tensor(numbers, dtype=torch.float64)[steps] * scale).to(self._device, self._dtype)
            scaled = values * groups.sort(each[:, None])
            found = gradients_by_group(use.parameter_map, scaled, keys, groups, self._shape, self._dtype)
            for group, part in zip(groups.present, found, strict=True):
                if group >= 0:
                    total[group] += part
