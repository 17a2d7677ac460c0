"""Preparing a step: what an optimizer is about to do, found just before it does it, or why that cannot be recorded.

The histories of the gradients are resolved to a factor per backward, the optimizer's settings are read, and the calls
whose gradients reach the step are joined with the user's columns.
"""

from collections.abc import Collection, Sequence
from typing import Literal

from dualform.errors import AnnotationError
from dualform.recording.alignment import Alignment
from dualform.recording.facts import StepContext, gather_facts
from dualform.recording.gradient_history import fetch_histories, resolve_all
from dualform.recording.optimizers import pending_scale
from dualform.recording.probes import GradientProbes
from dualform.recording.recorded_optimizers import RecordedOptimizer
from dualform.recording.sinks import ParameterFacts, PreparedStep, StepCall
from dualform.recording.step_calls import UnfittingColumn, gather_calls
from dualform.recording.step_in_progress import StepInProgress
from dualform.recording.user_warnings import WarnOnce, warn_user
from dualform.recording.watch import Watched
from dualform.threads import one_thread

OnFailure = Literal["raise", "detach"]
MAX_COLUMNS_TOLD = 4  # columns that do not fit, named in one warning


class StepPreparation:
    """Finds what a step will do, from what was accumulated for it."""

    def __init__(
        self,
        exact: Collection[str],
        alignment: Alignment,
        probes: GradientProbes,
        warn_once: WarnOnce,
        *,
        batch_axis: int,
        on_failure: OnFailure,
    ) -> None:
        """Prepare the steps of one recording.

        Args:
            exact: names of the parameters of layers whose values are recorded.
            alignment: what is known of the layers' rows.
            probes: measures gradients.
            warn_once: tells the user of columns that are left out.
            batch_axis: the axis of a layer's input that is the batch, unless the layer's kind has one of its own.
            on_failure: "raise" where columns fit no layer, or "detach": leave them out.
        """
        self._exact = exact
        self._alignment = alignment
        self._probes = probes
        self._warn_once = warn_once
        self._batch_axis = batch_axis
        self._on_failure = on_failure

    def prepare(self, owned: RecordedOptimizer, step: StepInProgress, number: int, *, on_cpu: bool) -> PreparedStep:
        """Return what an optimizer is about to do, or refuse.

        Args:
            owned: the optimizer.
            step: what was accumulated, and what other optimizers did in the same step.
            number: how many steps were recorded before.
            on_cpu: whether all parameters are in the CPU's memory.
        """
        optimizer, mine = owned.optimizer, owned.parameters
        scale, skipped = pending_scale(optimizer)
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        finals = [
            None if skipped else self._probes.probe(name, parameter, size="later") for name, parameter in mine.items()
        ]
        histories = [step.history(name, parameter) for name, parameter in mine.items()]
        seen = list(zip(histories, finals, strict=True))
        seen = seen if on_cpu else fetch_histories(seen)
        context = StepContext(self._exact, step.graph_of, len(step.backwards), scale, skipped)
        step.graph_of = None
        with one_thread():  # what is left of gradients is small
            resolutions = resolve_all(seen)
        facts = [
            gather_facts(owned, name, parameter, groups[id(parameter)], resolution, context)
            for (name, parameter), resolution in zip(mine.items(), resolutions, strict=True)
        ]
        return PreparedStep(number, facts, self._annotated_calls(step, [*step.done.facts, *facts], number))

    def _annotated_calls(
        self, step: StepInProgress, facts: Sequence[ParameterFacts], number: int
    ) -> Sequence[StepCall]:
        """Return the calls of a step; with on_failure="detach" without columns where those do not fit."""
        try:
            return self._calls(step, facts)
        except AnnotationError as error:
            if self._on_failure == "raise":
                raise
            text = f"The patterns of step {number} get no annotations, and training goes on: {error}"
            self._warn_once(text, key=str(error))
            for accumulated in step.calls:
                accumulated.arrival.call.binding = None
            return self._calls(step, facts)

    def _calls(self, step: StepInProgress, facts: Sequence[ParameterFacts]) -> Sequence[StepCall]:
        """Return the calls whose gradient reaches the step through at least one parameter."""
        factors = {fact.parameter: fact.factors for fact in facts if fact.updated}
        gathered = gather_calls(step.backwards, factors, self._axis)
        if self._alignment.enabled:
            for name, check in gathered.checks.items():
                self._alignment.note(name, check)
            for text in self._alignment.warnings():
                self._warn_once(text)
        if gathered.skipped:
            self._warn_once(
                "annotate() came before a forward pass that had no backward, and its columns were not given to the "
                "batch after it. Call annotate() before each forward that trains."
            )
        for column in gathered.unfitting:
            if column.everywhere:
                for accumulated in step.calls:
                    if accumulated.arrival.call.binding is column.binding:
                        accumulated.arrival.call.binding = None  # a second attempt at this step goes without it
                raise AnnotationError(
                    f"The annotation fits no recorded layer: {column.text}. Annotate one entry per row."
                )
        self._tell_unfitting(gathered.unfitting)
        return gathered.calls

    def _tell_unfitting(self, unfitting: Sequence[UnfittingColumn]) -> None:
        """Warn once of each layer that cannot take a column, of all that are found in a step together."""
        new = {f"unfitting {(column.layer, column.name)}": column.text for column in unfitting}
        texts = [text for key, text in new.items() if self._warn_once.is_new(key)]
        if texts:
            more = f"; and {len(texts) - MAX_COLUMNS_TOLD} more" if len(texts) > MAX_COLUMNS_TOLD else ""
            told = "; ".join(texts[:MAX_COLUMNS_TOLD])
            warn_user(f"Columns are left out (null) where they do not fit: {told}{more}.")

    def _axis(self, layer: Watched) -> int:
        return self._batch_axis if layer.kind.batch_axis is None else layer.kind.batch_axis
