"""A restartable training walked back: from its last restart point to its first, each step put back to before it.

The steps between two restart points are taken forwards, under the proof of every replay, and their states are held;
then the training is put back to each of them, the last first. With points every sqrt(S) of S steps, sqrt(S) states lie
on disk and sqrt(S) in memory, and all steps are taken twice at most.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.engine.walk_back import GroupUpdate, ParameterState, RetracedStep, VisitStep
from dualform.errors import QueryError
from dualform.recording.unwrap import unwrap_all
from dualform.recording.watch import plain_name
from dualform.replaying.restartable import Restartable, SampleLosses, State, put_back
from dualform.torch_modes import call_without_autocast, with_gradients


class ReplayWatched(Protocol):
    """Replays some steps of a training, and lets somebody watch its state."""

    def __call__(self, steps: range, watch: "StateWatch", /) -> None:
        """Take some steps again.

        Args:
            steps: their numbers.
            watch: looks at the training's state before each of them.
        """


class StateWatch:
    """Holds what a training is before each of some steps, and what its optimizers take in each of them."""

    def __init__(self, steps: range) -> None:
        """Prepare to watch some steps."""
        self.points: dict[int, Mapping[str, Any]] = {}
        self._steps = steps
        self._number = -1
        self._taken: dict[int, dict[Tensor, Tensor]] = {}
        self._settings: dict[int, dict[tuple[int, int], Mapping[str, Any]]] = {}
        self._state: State = {}
        self._optimizers: list[Optimizer] = []

    def begin(self, state: State) -> None:
        """Take the state of a training that begins, and watch its optimizers."""
        self._state = state
        self._optimizers = unwrap_all(state["optimizer"])
        for index, optimizer in enumerate(self._optimizers):
            optimizer.register_step_pre_hook(functools.partial(self._before_update, index))

    def before_step(self, number: int, take: Callable[[], Mapping[str, Any]]) -> None:
        """Hold the state before a step."""
        self._number = number
        if number in self._steps:
            self.points[number] = take()
            self._taken[number], self._settings[number] = {}, {}

    def _before_update(self, index: int, *_: Any) -> None:
        """Hold the gradients and the settings that an optimizer takes."""
        if self._number not in self._steps:
            return
        for at, group in enumerate(self._optimizers[index].param_groups):
            settings = {
                name: value.detach().clone() if isinstance(value, Tensor) else value  # a schedule writes into tensors
                for name, value in group.items()
                if name != "params"
            }
            self._settings[self._number][index, at] = settings
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._taken[self._number][parameter] = parameter.grad.detach().clone()

    def now(self) -> tuple[list[Tensor], list[ParameterState]]:
        """Return copies of the parameters, and of what the optimizers keep of each."""
        held = self._held()
        kept = {parameter: state for optimizer in self._optimizers for parameter, state in optimizer.state.items()}
        copies: list[ParameterState] = [
            {name: one.detach().clone() if isinstance(one, Tensor) else one for name, one in kept.get(p, {}).items()}
            for p in held
        ]
        return [parameter.detach().clone() for parameter in held], copies

    def _held(self) -> list[Tensor]:
        """Return the parameters that the optimizers hold, in their order."""
        return [p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]]

    def put_back(self, number: int) -> None:
        """Put the training back to what it was before a step, and forget it."""
        put_back(self._state, self.points.pop(number))

    def taken_step(
        self,
        number: int,
        train: Restartable,
        loss: SampleLosses,
        now: tuple[list[Tensor], list[ParameterState]],
        after: tuple[list[Tensor], list[ParameterState]],
    ) -> RetracedStep:
        """Return the step that the training is put back to."""
        model: nn.Module = self._state["model"]
        held = self._held()
        names: dict[Tensor, str] = {parameter: plain_name(name) for name, parameter in model.named_parameters()}
        place = {parameter: at for at, parameter in enumerate(held)}
        batch = train.batches[number]
        updates = []
        for (index, at), settings in self._settings.pop(number).items():
            optimizer = self._optimizers[index]
            places = [place[parameter] for parameter in optimizer.param_groups[at]["params"]]
            updates.append(GroupUpdate(type(optimizer), settings, places))
        gradients = self._taken.pop(number)
        return RetracedStep(
            number=number,
            names=[names.get(parameter, f"parameter {at}") for at, parameter in enumerate(held)],
            parameters=held,
            states=now[1],
            gradients=[gradients.get(parameter) for parameter in held],
            updates=updates,
            after=after[0],
            states_after=after[1],
            buffers=dict(model.named_buffers()),
            columns=train.columns_of(batch),
            losses=lambda: loss(model, batch),
            max_norm=train.max_norm,
        )


def walk_training_back(train: Restartable, replay: ReplayWatched, visit: VisitStep, *, steps: int, every: int) -> None:
    """Show each step of a training, the last one first.

    Args:
        train: the training.
        replay: takes some of its steps again.
        visit: looks at each step.
        steps: how many steps to walk back from.
        every: how many steps lie between two restart points.
    """
    if train.loss is None:
        raise QueryError(
            "Unrolled effects differentiate the loss of each sample, which this training does not give. Make it with "
            "Restartable(..., loss=loss): of the model and a batch, the losses (B,) whose mean a step minimises."
        )
    loss = train.loss
    later: tuple[list[Tensor], list[ParameterState]] | None = None
    for first in reversed(range(0, steps, every)):
        here = range(first, min(first + every, steps))
        watch = StateWatch(here)
        replay(here, watch)
        if later is None:
            later = watch.now()
        for number in reversed(here):
            watch.put_back(number)
            now = watch.now()
            _visit_in_plain_modes(visit, watch.taken_step(number, train, loss, now, later))
            later = now


@with_gradients
def _visit_in_plain_modes(visit: VisitStep, step: RetracedStep) -> None:
    """Show a step under the modes of torch that the training itself began with."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    call_without_autocast(kinds, lambda: visit(step))
