"""The step in progress: everything that belongs to one step of a recording, from its first backward to its sink.

With one optimizer a step of the recording is its step. Several optimizers share a step when they step one after the
other with no backward between them, so that a layer whose parameters are divided among them keeps one row per pattern.
So a step goes through these phases, of which the second comes once for each optimizer:

- "accumulating": backwards have added calls and gradient histories, and no optimizer has stepped;
- "stepping": an optimizer is about to step, or inside of its step, and what it does is prepared;
- "taken": at least one optimizer has stepped. The step ends when all have, or when training goes on without some.

Holds data and decides nothing: what to record, to refuse and to hand on is the recorder's business.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from torch import nn
from torch.optim import Optimizer

from dualform.recording.divided import OwnRows
from dualform.recording.gradient_history import GradientHistory
from dualform.recording.hooks import Arrival
from dualform.recording.sinks import ParameterFacts, PreparedStep, StepCall

if TYPE_CHECKING:
    from dualform.recording.late_steps import LateStep

Phase = Literal["accumulating", "stepping", "taken"]


class AccumulatedCall(NamedTuple):
    """A call as the sink has it: its number there, and what the recorder knows of it."""

    number: int
    arrival: Arrival


@dataclass(slots=True)
class Backward:
    """One backward since the last step."""

    number: int  # among all backwards of the recording that accumulated anything
    task: int  # autograd's number of its graph task
    calls: list[AccumulatedCall] = field(default_factory=list)
    discarded: bool = False  # whether the sink was told that no step will have any part of it


@dataclass(slots=True)
class OptimizersDone:
    """What the optimizers that have taken part in a step so far did."""

    ids: set[int] = field(default_factory=set)  # of the optimizers
    facts: list[ParameterFacts] = field(default_factory=list)
    calls: Sequence[StepCall] = ()

    def add(self, optimizer: Optimizer, prepared: PreparedStep) -> None:
        """Note an optimizer's step; its calls are those that reach any optimizer so far."""
        self.ids.add(id(optimizer))
        self.facts.extend(prepared.facts)
        self.calls = prepared.calls


@dataclass(slots=True)
class StepInProgress:
    """The step that is being accumulated and taken. One object serves a whole recording: a step's end begins the next.

    Attributes:
        backwards: accumulated since the last step; index = micro.
        histories: parameter -> what was measured of its gradient since its last step.
        graph_of: a layer whose backward built a graph of itself (create_graph=True), since the last step.
        prepared: what the optimizer that steps now is about to do. Stays where that step never ends.
        evaluations: how many times the optimizer that steps now has evaluated its closure.
        done: the optimizers that have stepped.
    """

    backwards: list[Backward] = field(default_factory=list)
    histories: dict[str, GradientHistory] = field(default_factory=dict)
    graph_of: str | None = None
    prepared: "PreparedStep | LateStep | None" = None
    evaluations: int = 0
    done: OptimizersDone = field(default_factory=OptimizersDone)

    @property
    def phase(self) -> Phase:
        """How far the step is. An optimizer that failed in its step leaves it "stepping" until the next one begins."""
        if self.prepared is not None:
            return "stepping"
        return "taken" if self.done.ids else "accumulating"

    @property
    def calls(self) -> list[AccumulatedCall]:
        """The accumulated calls of all backwards."""
        return [call for backward in self.backwards for call in backward.calls]

    def history(self, name: str, parameter: nn.Parameter) -> GradientHistory:
        """Return the history of a parameter's gradient since its last step."""
        found = self.histories.get(name)
        if found is None:
            found = self.histories[name] = GradientHistory(parameter.shape[1:].numel())
        return found

    def micro(self, task: int) -> int | None:
        """Return which backward of the step a graph task is, or None if it has accumulated nothing yet."""
        for micro, backward in enumerate(self.backwards):
            if backward.task == task:
                return micro
        return None

    def is_cleared(self, parameters: Mapping[str, nn.Parameter], accumulating: str) -> bool:
        """Say whether every accumulated gradient was cleared without a step, as one parameter accumulates anew."""
        for name, history in self.histories.items():
            parameter = parameters[name]
            if isinstance(parameter, OwnRows):  # its own rows alone may be zero
                gradient = history.waiting if name == accumulating else parameter.own_gradient
                left = gradient is not None or parameter.grad is not None
            elif name == accumulating:
                left = history.waiting is not None and not history.waiting.zero
            else:
                left = parameter.grad is not None and bool(parameter.grad.any())
            if left:
                return False
        return True

    def clear(self) -> list[int]:
        """Let go of everything that was accumulated; return the numbers of the backwards that this discards."""
        gone, self.backwards, self.histories = self.backwards, [], {}
        return [backward.number for backward in gone if not backward.discarded]

    def keep(self, parameters: Collection[str]) -> list[int]:
        """Let go of everything that none of these parameters waits for; return the numbers of those backwards.

        A backward that is let go of keeps its place while others are waited for: its place is its micro.
        """
        self.histories = {name: history for name, history in self.histories.items() if name in parameters}
        micros = {event.micro for history in self.histories.values() for event in history.accumulations}
        gone = [one for micro, one in enumerate(self.backwards) if micro not in micros and not one.discarded]
        for backward in gone:
            backward.calls.clear()
            backward.discarded = True
        if not micros:
            self.backwards, self.histories = [], {}
        return [backward.number for backward in gone]

    def end(self) -> OptimizersDone:
        """Return what the optimizers did, and wait for the next step."""
        ended, self.done = self.done, OptimizersDone()
        return ended
