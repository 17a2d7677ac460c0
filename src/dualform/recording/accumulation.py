"""What one backward accumulates: its patterns go to the sink, and samples of its gradients are kept for the step.

The hooks report each parameter before and after a backward adds to its gradient, and a sample of the gradient is taken
each time. Whether the patterns explain the gradient is asked at the step (`step_preparation`).
"""

import itertools
from collections.abc import Mapping, Sequence

from torch import nn

from dualform.recording.check_schedule import CheckSchedule
from dualform.recording.divided import OwnRows, accumulated_gradient
from dualform.recording.gradient_check import GradientCheck
from dualform.recording.gradient_history import Accumulation, GradientHistory
from dualform.recording.hooks import Arrival
from dualform.recording.probes import is_at_hand
from dualform.recording.sinks import CallRecord, Sink
from dualform.recording.step_in_progress import AccumulatedCall, Backward, StepInProgress

BACKWARDS_BETWEEN_LOOKS = 8
"""Of this many backwards without a step one asks whether all gradients on a GPU were cleared."""


class Accumulations:
    """Follows the backwards of one recording, and hands their patterns over."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        step: StepInProgress,
        sink: Sink,
        check: GradientCheck,
        schedule: CheckSchedule,
    ) -> None:
        self._parameters = parameters
        self._widths = {name: parameter.shape[1:].numel() for name, parameter in parameters.items()}
        self._step = step
        self._sink = sink
        self._check = check
        self._schedule = schedule
        self._backward_numbers = itertools.count()
        self._call_numbers = itertools.count()

    def begin(self, name: str, parameter: nn.Parameter) -> None:
        """Take a sample of a parameter's gradient before a backward adds to it."""
        gradient = accumulated_gradient(parameter)
        reduced = parameter.grad if isinstance(parameter, OwnRows) else None
        if gradient is None and reduced is None and name not in self._step.histories:
            return
        history = self._step.history(name, parameter)
        projected = history.projected
        history.waiting = self._check.sample(name, parameter, gradient, projected=projected, look="now")
        history.reduced = self._check.sample(name, parameter, reduced, projected=projected, look="now")

    def is_unstepped(self, name: str, task: int) -> bool:
        """Say whether a graph task is a new backward, and every gradient so far was cleared without a step.

        To look at gradients on a GPU is to wait for it, so there only one backward in several is asked. Patterns whose
        gradients were cleared reach no step in any case; they are only kept for longer.
        """
        backwards = self._step.backwards
        if (backwards and backwards[-1].task == task) or self._step.micro(task) is not None:
            return False
        if len(backwards) % BACKWARDS_BETWEEN_LOOKS and not is_at_hand(self._parameters[name]):
            return False
        return self._step.is_cleared(self._parameters, name)

    def discard(self) -> None:
        """Let go of everything that was accumulated since the last step: no step will have it."""
        if gone := self._step.clear():
            self._sink.discard(gone)

    def end(self, name: str, parameter: nn.Parameter, task: int, arrivals: Sequence[Arrival]) -> None:
        """Hand over the patterns that a backward has just accumulated into a parameter, and take their measure.

        Args:
            name: the parameter's name.
            parameter: the parameter.
            task: autograd's number of the backward's graph task.
            arrivals: the calls of all layers that use the parameter and that this backward came to.
        """
        micro, backward = self._backward(task)
        number = backward.number
        for arrival in arrivals:
            if arrival.backward != number:
                self._hand_over(backward, arrival)
        whole = self._schedule.next_is_full
        for arrival in arrivals:
            whole = whole or arrival.call.coarse is not None
        gradient = accumulated_gradient(parameter)
        after = self._check.sample(name, parameter, gradient, projected=True if whole else None)
        assert after is not None, "a gradient was just accumulated"
        histories = self._step.histories
        if name not in histories:
            histories[name] = GradientHistory(self._widths[name])
        history = histories[name]
        history.accumulations.append(Accumulation(micro, history.waiting, after, history.reduced))
        history.waiting = history.reduced = None

    def _backward(self, task: int) -> tuple[int, Backward]:
        """Return a graph task's backward and its place in the step; a new one where it has accumulated nothing yet."""
        backwards = self._step.backwards
        if backwards and backwards[-1].task == task and not backwards[-1].discarded:
            return len(backwards) - 1, backwards[-1]
        micro = self._step.micro(task)
        if micro is None:
            micro = len(backwards)
            backwards.append(Backward(next(self._backward_numbers), task))
        elif backwards[micro].discarded:  # a step inside the backward has ended, and the backward goes on
            backwards[micro] = Backward(next(self._backward_numbers), task)
        return micro, backwards[micro]

    def _hand_over(self, backward: Backward, arrival: Arrival) -> None:
        """Give the sink the patterns of a call that was just accumulated."""
        number, layer = next(self._call_numbers), arrival.call.layer
        assert arrival.keys is not None, "patterns are copied before they are handed over"
        values = None if layer.keys_only else arrival.values
        raw, unfolding = arrival.call.raw, arrival.unfolding
        first = None if backward.calls else arrival.seen
        self._sink.call(CallRecord(number, backward.number, layer.name, arrival.keys, values, raw, unfolding, first))
        backward.calls.append(AccumulatedCall(number, arrival))
        arrival.backward = backward.number
