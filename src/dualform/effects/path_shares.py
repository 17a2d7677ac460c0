"""Each group's share of every parameter at any step on the way, for path contributions.

An optimizer whose steps are numbers (SGD) lets many steps be followed at once: values are multiplied with what their
step's gradient has become by now, and one product per group adds all of them. The others follow every step.
"""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.engine.parameter_steps import Following, GroupsByPart, RetakenStep, SettingsRow
from dualform.engine.shares import GroupsOfCalls
from dualform.engine.stored_calls import StoredCall
from dualform.identity.families.elementwise import ElementwiseStep
from dualform.identity.families.optimizer_replay import OptimizerReplay, Share
from dualform.identity.parameter_use import ParameterUse


@dataclass(frozen=True, slots=True)
class SharesNow:
    """A parameter after some step, and what it is made of, float64: parameter = start + shares + rest.

    Attributes:
        parameter: the parameter itself.
        parts: (G + 2, ...) each group's share, then what is left of the start, then the rest, which is rounding.
    """

    parameter: Tensor
    parts: Tensor


@dataclass(frozen=True, slots=True)
class PathShares:
    """Follow the shares of so many groups, to be looked at after any step."""

    groups: int

    def start(self, replay: OptimizerReplay, groups: GroupsByPart | None) -> "PathFollowing":
        """Return the following of one parameter."""
        kind = _ManySteps if replay.kind.has_coefficients else _EveryStep
        return kind(replay, self.groups, groups)


class PathFollowing(Following[SharesNow]):
    """What each group, the start and rounding have made of one parameter so far, followed through its steps."""

    def __init__(self, replay: OptimizerReplay, groups: int, by: GroupsByPart | None) -> None:
        self._replay = replay
        self._groups = groups
        self._groups_of = GroupsOfCalls(by)
        self._shape = replay.parameter.shape

    @abstractmethod
    def shares(self) -> Tensor:
        """Return each group's share and what is left of the start by now, (G + 1, ...), float64."""

    def result(self) -> SharesNow:
        """Return where the parameter and its shares have come to; may be asked after any step."""
        parameter = self._replay.parameter.detach().to(torch.float64, copy=True)
        known = self.shares()
        return SharesNow(parameter, torch.cat([known, (parameter - known.sum(0))[None]]))

    def _codes(self, call: StoredCall) -> Tensor:
        """Return the group of each pattern of a call, (n,), -1 for none."""
        found = self._groups_of.of(call)
        return torch.zeros(len(call.values), dtype=torch.int64) if found is None else found


class _EveryStep(PathFollowing):
    """Shares that move with every step, by its linear map."""

    def __init__(self, replay: OptimizerReplay, groups: int, by: GroupsByPart | None) -> None:
        super().__init__(replay, groups, by)
        self._start = replay.share()
        self._shares = [Share(torch.zeros_like(self._start.weight)) for _ in range(groups)]
        self._gradients: dict[int, Tensor] = {}  # of the step that comes next, by group

    def before_step(self, row: SettingsRow) -> None:
        self._gradients = {}

    def add_call(self, call: StoredCall, use: ParameterUse, gradient: Tensor, factor: float) -> None:
        codes = self._codes(call)
        for group in codes.unique().tolist():
            if group >= 0:
                part = call.exact(use, self._shape, codes == group) * factor
                self._gradients[group] = part + self._gradients[group] if group in self._gradients else part

    def after_step(self, taken: RetakenStep) -> None:
        self._start.step(taken.linear, None)
        for group, share in enumerate(self._shares):
            share.step(taken.linear, self._gradients.get(group))

    def shares(self) -> Tensor:
        return torch.stack([*(share.weight for share in self._shares), self._start.weight])


class _ManySteps(PathFollowing):
    """Shares under an optimizer whose steps are numbers: brought up to date only when they are looked at."""

    def __init__(self, replay: OptimizerReplay, groups: int, by: GroupsByPart | None) -> None:
        super().__init__(replay, groups, by)
        start = replay.share()
        zeros = start.weight.new_zeros(groups, *self._shape)
        self._weights = torch.cat([zeros, start.weight[None]])
        self._averages = torch.cat([zeros, start.average[None]])
        self._maps: list[ElementwiseStep] = []  # of the steps that are not followed yet
        self._calls: list[tuple[int, StoredCall, ParameterUse, float, Tensor]] = []  # of those steps, by place in _maps

    def add_call(self, call: StoredCall, use: ParameterUse, gradient: Tensor, factor: float) -> None:
        self._calls.append((len(self._maps), call, use, factor, self._codes(call)))

    def after_step(self, taken: RetakenStep) -> None:
        assert isinstance(taken.linear, ElementwiseStep), "an optimizer with coefficients has steps of numbers"
        self._maps.append(taken.linear)

    def shares(self) -> Tensor:
        """Follow the steps since the last look."""
        if self._maps:
            self._follow()
            self._maps, self._calls = [], []
        return self._weights

    def _follow(self) -> None:
        # What (W, m, g) before each step become after the last, in W and in m: from the last step to the first.
        w_of_w, w_of_m, m_of_w, m_of_m = 1.0, 0.0, 0.0, 1.0
        on_weight, on_average = [0.0] * len(self._maps), [0.0] * len(self._maps)
        for i in range(len(self._maps) - 1, -1, -1):
            step = self._maps[i]
            beta, p, q = float(step.beta), float(step.on_average), float(step.on_gradient)
            # m' = alpha m + beta d, W' = kappa W - P m' - Q d, with d = sign g + decay W
            d_in_w, d_in_m, m_in_w, m_in_m = -(p * beta + q), beta, -p * step.alpha, step.alpha
            w_in_w, w_in_m = step.kappa + step.decay * d_in_w, step.decay * d_in_m
            on_weight[i] = step.sign * (w_of_w * d_in_w + w_of_m * d_in_m)
            on_average[i] = step.sign * (m_of_w * d_in_w + m_of_m * d_in_m)
            w_of_w, w_of_m = w_of_w * w_in_w + w_of_m * w_in_m, w_of_w * m_in_w + w_of_m * m_in_m
            m_of_w, m_of_m = m_of_w * w_in_w + m_of_m * w_in_m, m_of_w * m_in_w + m_of_m * m_in_m
        weights = w_of_w * self._weights + w_of_m * self._averages
        averages = m_of_w * self._weights + m_of_m * self._averages
        self._weights, self._averages = weights, averages
        for use in dict.fromkeys(use for _, _, use, _, _ in self._calls):
            mine = [(i, call, factor, codes) for i, call, u, factor, codes in self._calls if u == use]
            keys = torch.cat([call.keys for _, call, _, _ in mine])
            codes = torch.cat([codes for *_, codes in mine])
            order = codes.argsort(stable=True)
            keys = keys[order]
            bounds = torch.searchsorted(codes[order], torch.arange(self._groups + 1)).tolist()
            for total, numbers in ((self._weights, on_weight), (self._averages, on_average)):
                if not any(numbers):
                    continue
                values = torch.cat([call.values * (numbers[i] * factor) for i, call, factor, _ in mine])[order]
                for group in range(self._groups):
                    rows = slice(bounds[group], bounds[group + 1])
                    if rows.stop > rows.start:
                        total[group] += use.parameter_map.gradient(values[rows], keys[rows], self._shape)
