"""Steps that were made and that the sink gets later: when their numbers have come from the GPU.

The recorder asks for a made step at the next step, at a flush and at closing; and where nobody closes a recording, its
end does (`ending.py`), which must not hold the recorder.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from dualform.recording.alignment import Alignment
from dualform.recording.changes import Changes
from dualform.recording.late_steps import LateStep
from dualform.recording.sinks import Sink, StepFacts
from dualform.recording.step_preparation import StepPreparation
from dualform.torch_modes import without_gradients


@dataclass(frozen=True, slots=True)
class _MadeStep:
    """A step that was made.

    Attributes:
        step: the step, its numbers on their way.
        gone: the numbers of its backwards, of which no other step will have any part.
        samples: of the parameters after it.
    """

    step: LateStep
    gone: Sequence[int]
    samples: Mapping[str, Tensor]


class MadeSteps:
    """Holds the last step until the sink gets it. There is never more than one."""

    def __init__(
        self,
        preparation: StepPreparation,
        changes: Changes,
        alignment: Alignment,
        sink: Sink,
        snapshot: Callable[[], dict[str, Tensor]],
        parameters: Mapping[str, Tensor],
    ) -> None:
        """Hold the steps of one recording.

        Args:
            preparation: finds what a step did from its numbers.
            changes: refuses a step before which something else moved parameters.
            alignment: what is known of the layers' rows.
            sink: takes the steps.
            snapshot: returns copies of the parameters as the last step left them.
            parameters: the covered parameters themselves.
        """
        self._preparation = preparation
        self._changes = changes
        self._alignment = alignment
        self._sink = sink
        self._snapshot = snapshot
        self._parameters = parameters
        self._made: _MadeStep | None = None

    def note(self, step: LateStep, gone: Sequence[int], samples: Mapping[str, Tensor]) -> None:
        """Hold a step that was just made; see `_MadeStep`."""
        assert self._made is None, "the step before was handed on"
        self._made = _MadeStep(step, gone, samples)

    @without_gradients
    def hand_on(self) -> None:
        """Give the step that is held to the sink, or refuse it; does nothing where none is held."""
        made, self._made = self._made, None
        if made is None:
            return
        try:
            done = self._preparation.finish(made.step, self._changes)
            rows = dict(self._alignment.outcomes)
            found = done.calls, done.facts
            self._sink.step(StepFacts(done.step, *found, made.samples, self._snapshot, rows, self._parameters))
        finally:
            if made.gone:
                self._sink.discard(made.gone)
