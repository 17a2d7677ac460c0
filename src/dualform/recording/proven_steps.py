"""Steps that are proved to be steps of an earlier recording: nothing that was checked then is checked again.

A training that is run again is compared with its recording after every step, to the bit of every parameter
(`dualform.replaying`). So gradients need no samples and no comparison with their patterns, and parameters none with
what the last step left. The factor between a backward's gradient and its step's is known from the recording too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dualform.recording.accumulation import Accumulations
from dualform.recording.alignment import Alignment
from dualform.recording.annotations import Binding
from dualform.recording.changes import Changes
from dualform.recording.gradient_history import Accumulation, GradientHistory
from dualform.recording.gradient_samples import GradientSample
from dualform.recording.hooks import Arrival
from dualform.recording.optimizers import pending_scale
from dualform.recording.parameter_facts import look_before_step
from dualform.recording.parameter_samples import ParameterSamples
from dualform.recording.recorded_optimizers import RecordedOptimizer
from dualform.recording.rowcheck import RowCheck
from dualform.recording.sinks import ParameterFacts, PreparedStep
from dualform.recording.step_in_progress import StepInProgress
from dualform.recording.step_preparation import StepPreparation
from dualform.recording.watch import Watched


@dataclass(frozen=True, slots=True)
class KnownSteps:
    """What an earlier recording found of the steps that are taken again.

    Attributes:
        factors: returns, for the number of a step, each parameter's factors per backward.
        rows: the layers that do not have the batch's rows, where all others have them on the batch's own axis; None
            where the layers' rows have to be tried again.
        processes: how many processes take the steps together. Recorded factors are those of all of them: as many as
            the process with most backwards in a step has.
    """

    factors: Callable[[int], Mapping[str, Sequence[float]]]
    rows: Mapping[str, RowCheck] | None
    processes: int = 1


_NOT_TAKEN = GradientSample(torch.empty(0))


class ProvenAccumulations(Accumulations):
    """Hands patterns over, and takes no sample of a gradient, unless several backwards share a step.

    Then it matters whether a gradient was cleared between two of them: its patterns reach no step.
    """

    def begin(self, name: str, parameter: nn.Parameter) -> None:
        """Take a sample of a parameter's gradient where an earlier backward of the step has added to it."""
        if name in self._step.histories:
            super().begin(name, parameter)

    def end(self, name: str, parameter: nn.Parameter, task: int, arrivals: Sequence[Arrival]) -> None:
        """Hand over the patterns that a backward has just accumulated into a parameter."""
        micro, backward = self._backward(task)
        for arrival in arrivals:
            if arrival.backward != backward.number:
                self._hand_over(backward, arrival)
        histories = self._step.histories
        if name not in histories:
            histories[name] = GradientHistory(self._widths[name])
        histories[name].accumulations.append(Accumulation(micro, None, _NOT_TAKEN))
        histories[name].waiting = None


class ProvenPreparation(StepPreparation):
    """Finds what a step will do from the optimizer's settings and from the factors of the earlier recording."""

    def __init__(self, known: KnownSteps, *arguments: Any, **options: Any) -> None:
        """Prepare the steps of one recording; see `StepPreparation` for all arguments but `known`."""
        super().__init__(*arguments, **options)
        self._known = known

    def prepare(self, owned: RecordedOptimizer, step: StepInProgress, number: int, *, on_cpu: bool) -> PreparedStep:
        """Return what an optimizer is about to do."""
        skipped = pending_scale(owned.optimizer)[1]
        step.graph_of = None
        known, micros = self._known.factors(number), len(step.backwards)
        usual = [1.0] * micros
        facts = []
        for name, (settings, has_gradient, _) in look_before_step(owned).items():
            factors = known.get(name, usual)
            if skipped:
                factors = []
            elif len(factors) < micros or (len(factors) > micros and self._known.processes == 1):
                factors = usual  # the step has other calls than the recorded one, which its proof will say
            facts.append(ParameterFacts(name, owned.name, has_gradient and not skipped, settings, factors))
        return PreparedStep(number, facts, self._annotated_calls(step, [*step.done.facts, *facts], number))


class ProvenAlignment(Alignment):
    """Tells every batch what the earlier recording found of the layers' rows, and tries nothing."""

    def __init__(
        self, model: nn.Module, layers: Sequence[Watched], batch_axis: int | None, rows: Mapping[str, RowCheck]
    ) -> None:
        super().__init__(model, layers, batch_axis, enabled=False)
        self._rows = rows

    def before_forward(self, binding: Binding, *_: Any, **__: Any) -> None:
        """Tell a binding which layers do not have its rows."""
        if binding.rows >= 2:
            binding.learn(self._rows)


class ProvenChanges(Changes):
    """Compares nothing: the proof of each step finds what moved a parameter between two steps."""

    def note(self, owned: RecordedOptimizer, parameters: Mapping[str, nn.Parameter]) -> ParameterSamples:
        """Keep nothing."""
        return ParameterSamples(())

    def check(self, owned: RecordedOptimizer, step: int) -> None:
        """Refuse nothing."""

    def changed(self) -> list[str]:
        """Return nothing."""
        return []

    def is_broken_off(self) -> bool:
        """Say no."""
        return False

    def unstepped(self) -> None:
        """Warn of nothing: the recording did."""

    def at_closing(self, step: int, find: Callable[[], int | None]) -> str:
        """Warn of nothing: the recording did."""
        return ""
