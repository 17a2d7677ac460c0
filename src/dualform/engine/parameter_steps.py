"""Take the steps of one parameter again, from the recorded patterns, by torch's own optimizer.

A step's gradient is summed call by call, in the order in which autograd summed it. What is wanted of the steps (the
shares of groups, doubts, rates) is found by a `Following`, which sees every call's gradient and every step.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualform.engine.facts_check import state_problem
from dualform.engine.source import PatternPart, PatternSource
from dualform.engine.stored_calls import StoredCall
from dualform.errors import CorruptError
from dualform.identity.families.optimizer_kind import OptimizerKind, Settings, StepMap, require_optimizer_kind
from dualform.identity.families.optimizer_replay import OptimizerReplay
from dualform.identity.parameter_use import ParameterUse

R = TypeVar("R")
SettingsRow = Mapping[str, Any]
"""The settings of one step as they were logged, without those that only other optimizers' parameters have."""


class GroupsByPart(Protocol):
    """The group of each pattern, for a job in the order of steps."""

    def codes(self, part: PatternPart, layer: str) -> npt.NDArray[np.int64] | None:
        """Return the group of each pattern of a part and layer, (n,), -1 for none; None if all are in group 0."""


@dataclass(frozen=True, slots=True)
class RetakenStep:
    """One step of one parameter that was taken again.

    Attributes:
        step: the step.
        row: the logged settings.
        settings: the settings as the optimizer takes them.
        linear: the step as a linear map.
        gradient: the gradient that the step was taken with.
        calls: the calls that reach the parameter, each with its use of the parameter, as autograd reaches them.
        factors: (micros,) what the gradient of each backward was multiplied with.
    """

    step: int
    row: SettingsRow
    settings: Settings
    linear: StepMap
    gradient: Tensor
    calls: Sequence[tuple[StoredCall, ParameterUse]]
    factors: npt.NDArray[np.float64]


class Following(ABC, Generic[R]):
    """What is found out along the steps of one parameter, from the first to the last."""

    def before_step(self, row: SettingsRow) -> None:
        """Prepare for a step whose logged settings these are."""

    def add_call(self, call: StoredCall, use: ParameterUse, gradient: Tensor, factor: float) -> None:
        """Take one call's gradient of the parameter, before the step that multiplies it with a factor."""

    @abstractmethod
    def after_step(self, taken: RetakenStep) -> None:
        """Take in a step."""

    def add_step(self, linear: StepMap, calls: Sequence[tuple[StoredCall, ParameterUse, float]]) -> None:
        """Take in a step that is not taken again: its map, and its calls, each with what multiplies its gradient."""
        raise NotImplementedError("this following needs its parameter's steps taken again")

    @abstractmethod
    def result(self) -> R:
        """Return what was found."""


class Follower(Protocol[R]):
    """What to find out along the steps of a parameter, as settings: the question of a `Fold`."""

    def start(self, replay: OptimizerReplay, groups: GroupsByPart | None) -> Following[R]:
        """Return the following of one parameter, whose replay has not taken a step yet."""


class Onlooker(ABC):
    """What is found out along the steps of several parameters that are looked at together."""

    @abstractmethod
    def after_step(self, step: int) -> None:
        """Look at the parameters after a step that all of them have taken."""

    @abstractmethod
    def result(self) -> Any:
        """Return what was found."""


class ParameterSteps:
    """One parameter on its way through the steps, and what follows it.

    With `from_settings`, steps are not taken again where their maps follow from settings alone.
    """

    def __init__(self, source: PatternSource, name: str, *, from_settings: bool = False) -> None:
        facts, self._factors = source.facts(name)
        kind = optimizer_of(source, name)
        initial, state = source.initial[name], source.initial_states.get(name, {})
        self._name = name
        self._from_settings = from_settings and kind.has_coefficients
        self._settings = facts.settings
        self._update_at = {int(step): i for i, step in enumerate(facts.step)}
        if problem := state_problem(kind, state, self._row(0) if len(facts.step) else {}):
            raise CorruptError(
                f"{source.name}: parameter {name!r} at the start: {problem}. Restore the run from a copy."
            )
        self.replay = OptimizerReplay(kind, initial, state)
        self.followings: list[Following[Any]] = []

    def follow(self, follower: Follower[R], groups: GroupsByPart | None) -> Following[R]:
        """Let one more following go along from here."""
        following = follower.start(self.replay, groups)
        self.followings.append(following)
        return following

    def take(self, step: int, calls: Sequence[StoredCall]) -> RetakenStep | None:
        """Take a step again and return it, or None if this parameter was not updated in it, or not taken again."""
        if step not in self._update_at:
            return None
        # Autograd reaches the last call first, and sums in the order in which it reaches them.
        backward = [(call, use) for call in reversed(calls) for use in call.entry.uses]
        mine = [(call, use) for call, use in backward if use.parameter == self._name]
        row = self._row(self._update_at[step])
        if self._from_settings:
            self._show(step, row, mine)
            return None
        for following in self.followings:
            following.before_step(row)
        micros = [m for m in sorted({call.micro for call, _ in mine}) if self._factors[step, m] != 0.0]
        gradient = self._gradient(mine, {m: float(self._factors[step, m]) for m in micros})
        settings = self.replay.kind.decode(row)
        try:
            linear: StepMap = self.replay.step(settings, gradient)
        except ArithmeticError as error:
            raise CorruptError(
                f"Step {step} of parameter {self._name!r} cannot be taken again ({error}): its logged settings, or the "
                "optimizer's state at the start, cannot be those of a training. Restore the run's files from a copy."
            ) from error
        taken = RetakenStep(step, row, settings, linear, gradient, mine, self._factors[step])
        for following in self.followings:
            following.after_step(taken)
        return taken

    def _show(self, step: int, row: SettingsRow, mine: Sequence[tuple[StoredCall, ParameterUse]]) -> None:
        """Show a step that is not taken again to what follows."""
        kind = self.replay.kind
        linear: StepMap = kind.read_settings(kind.decode(row), self.replay.parameter.dtype)
        factors = [(call, use, float(self._factors[step, call.micro])) for call, use in mine]
        for following in self.followings:
            following.add_step(linear, [each for each in factors if each[2] != 0.0])

    def _gradient(self, mine: Sequence[tuple[StoredCall, ParameterUse]], factors: Mapping[int, float]) -> Tensor:
        """Return the step's gradient as autograd summed it, and show each call's to what follows."""
        zero = torch.zeros_like(self.replay.parameter)
        # One factor for all backwards came last, as clipping does; otherwise each sum was multiplied in turn.
        common = next(iter(factors.values())) if len(set(factors.values())) == 1 else None
        total: Tensor | None = None
        for rank in sorted({call.rank for call, _ in mine}):
            own: Tensor | None = None  # each process has summed its own backwards before the sums were reduced
            for micro, factor in factors.items():
                backward: Tensor | None = None
                for call, use in [(c, u) for c, u in mine if c.micro == micro and c.rank == rank]:
                    one = call.gradient(use, zero.shape)
                    backward = one if backward is None else backward + one
                    for following in self.followings:
                        following.add_call(call, use, one, factor)
                if backward is not None:
                    scaled = backward if common is not None or factor == 1.0 else backward * factor
                    own = scaled if own is None else own + scaled
            if own is not None:
                total = own if total is None else total + own
        if total is not None and common is not None and common != 1.0:
            total = total * common
        return zero if total is None else total.reshape(zero.shape)

    def _row(self, update: int) -> dict[str, Any]:
        """Return the settings of one of the parameter's updates, counted from 0."""
        cells = {name: column[update] for name, column in self._settings.items()}
        known = {name: cell for name, cell in cells.items() if cell is not None and cell == cell}
        return {name: cell.item() if isinstance(cell, np.generic) else cell for name, cell in known.items()}


def optimizer_of(source: PatternSource, parameter: str) -> OptimizerKind[Any]:
    """Return the optimizer of a parameter, or raise if it is not known."""
    return require_optimizer_kind(source.facts(parameter)[0].optimizer)
