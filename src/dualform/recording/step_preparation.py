"""Preparing a step: what an optimizer is about to do, found just before it does it, or why that cannot be recorded.

The histories of the gradients are resolved to a factor per backward, the optimizer's settings are read, and the calls
whose gradients reach the step are joined with the user's columns.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from torch import nn

from dualform.errors import AnnotationError, RefusedError
from dualform.recording.alignment import Alignment
from dualform.recording.baseline import LaterComparison
from dualform.recording.changes import Changes
from dualform.recording.check_schedule import CheckSchedule
from dualform.recording.gradient_check import GradientCheck, Resolution, explain
from dualform.recording.gradient_history import (
    NOT_FINITE,
    Factors,
    GradientHistory,
    Seen,
    fetch_histories,
    follow_all,
    follow_views,
)
from dualform.recording.gradient_samples import GradientSample
from dualform.recording.hooks import Arrival
from dualform.recording.late_steps import LateStep
from dualform.recording.optimizers import pending_scale
from dualform.recording.parameter_facts import StepContext, gather_all_facts, look_before_step
from dualform.recording.probes import norms_of
from dualform.recording.recorded_optimizers import RecordedOptimizer
from dualform.recording.sinks import LiveParameter, ParameterFacts, PreparedStep, StepCall
from dualform.recording.step_calls import UnfittingColumn, gather_calls
from dualform.recording.step_in_progress import Backward, StepInProgress
from dualform.recording.user_warnings import WarnOnce, warn_user
from dualform.recording.watch import Watched
from dualform.threads import one_thread

OnFailure = Literal["raise", "detach"]
FactorsKind = Literal["none", "one", "several"]
MAX_COLUMNS_TOLD = 4  # columns that do not fit, named in one warning


class StepPreparation:
    """Finds what a step will do, from what was accumulated for it."""

    def __init__(
        self,
        exact: Collection[str],
        measured: Collection[str],
        alignment: Alignment,
        check: GradientCheck,
        schedule: CheckSchedule,
        warn_once: WarnOnce,
        *,
        batch_axis: int,
        on_failure: OnFailure,
    ) -> None:
        """Prepare the steps of one recording.

        Args:
            exact: names of the parameters of layers whose values are recorded.
            measured: those of them of which sums are kept and no patterns: what patterns do not explain of their
                gradients is measured by the sink, and not refused.
            alignment: what is known of the layers' rows.
            check: takes samples of gradients, and compares gradients with their patterns.
            schedule: says which steps are checked in full.
            warn_once: tells the user of columns that are left out.
            batch_axis: the axis of a layer's input that is the batch, unless the layer's kind has one of its own.
            on_failure: "raise" where columns fit no layer, or "detach": leave them out.
        """
        self._exact = exact
        self._measured = measured
        self._alignment = alignment
        self._check = check
        self._schedule = schedule
        self._warn_once = warn_once
        self._batch_axis = batch_axis
        self._on_failure = on_failure
        self._explainable = frozenset(exact) - frozenset(
            measured
        )  # parameters whose gradients patterns have to explain
        self._last_factors: FactorsKind = "none"  # of the last late step that was read
        self._lives: dict[int, tuple[Mapping[str, nn.Parameter], float, Mapping[str, LiveParameter]]] = {}

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
        context = StepContext(self._explainable, step.graph_of, len(step.backwards), scale, skipped)
        step.graph_of = None
        followed, samples = self._followed(mine, step, skipped=skipped, on_cpu=on_cpu)
        resolutions = self._explained(owned.name, mine, step, followed, samples, number, skipped=skipped)
        facts = gather_all_facts(owned, look_before_step(owned), resolutions, context)
        calls = self._annotated_calls(step, [*step.done.facts, *facts], number)
        return PreparedStep(number, facts, calls, self._live(owned, mine, scale))

    def begin(
        self, owned: RecordedOptimizer, step: StepInProgress, number: int, comparisons: Sequence[LaterComparison]
    ) -> LateStep:
        """Take what an optimizer is about to overwrite of a step, without waiting for a number; `finish` reads it.

        Args:
            owned: the only optimizer of the recording, its gradients on one GPU and scaled by no gradient scaler.
            step: what was accumulated.
            number: how many steps were made before.
            comparisons: of the parameters with what the last step left of them.
        """
        mine = owned.parameters
        before = look_before_step(owned)
        context = StepContext(self._explainable, step.graph_of, len(step.backwards), 1.0, False)
        step.graph_of = None
        seen = [self._seen(step.history(name, parameter), name, parameter, False) for name, parameter in mine.items()]
        finals = [final for _, final in seen if final is not None]
        gradients = [final.gradient for final in finals if final.gradient is not None]
        for one, norm in zip(finals, norms_of(gradients), strict=True):
            one.norm, one.gradient = norm, None  # the gradient itself may be overwritten
        # What happened to the gradients of this step is not known yet; a change is noticed one step later.
        kind = (owned.name, len(step.backwards), self._last_factors, frozenset(names_with_gradient(mine)))
        full = self._schedule.is_full(number, kind)
        views = {}
        for name, (calls, parameter, final) in self._compared(mine, step, seen, full=full).items():
            views[name] = self._check.view(name, parameter, calls, final.elements, _not_at_hand)
        return LateStep(number, owned, before, context, step.backwards, seen, views, comparisons)

    def _compared(
        self, mine: Mapping[str, nn.Parameter], step: StepInProgress, seen: Sequence[Seen], *, full: bool
    ) -> dict[str, tuple[Sequence[tuple[int, Arrival]], nn.Parameter, GradientSample]]:
        """Return the parameters whose gradients are compared with their patterns, with calls and samples at the step.

        That is in a full check, and of a gradient that autocast rounded.
        """
        coarse = full or _has_coarse_calls(step)
        arrivals = arrivals_of(step.backwards) if self._explainable and coarse else {}
        found: dict[str, tuple[Sequence[tuple[int, Arrival]], nn.Parameter, GradientSample]] = {}
        for (name, parameter), (_, final) in zip(mine.items(), seen, strict=True) if arrivals else ():
            calls = arrivals.get(name, [])
            rounded = any(arrival.call.coarse is not None for _, arrival in calls)
            if final is not None and name in self._explainable and (full or rounded):
                found[name] = calls, parameter, final
        return found

    def foresee(self, late: LateStep) -> PreparedStep:
        """Return what is known of a late step before it is made: settings, and which parameters have a gradient."""
        owned = late.owned
        facts = [
            ParameterFacts(name, owned.name, one.has_gradient, one.settings, []) for name, one in late.before.items()
        ]
        return PreparedStep(late.number, facts, (), self._live(owned, owned.parameters, 1.0))

    def finish(self, late: LateStep, changes: Changes) -> PreparedStep:
        """Read the numbers of a step that was made, and return what it did, or refuse it."""
        with one_thread():  # samples are small
            numbers = late.read()
        changes.refuse(numbers.changed, late.number)
        followed = numbers.followed
        self._last_factors = kind_of_factors(followed)
        resolutions: list[Resolution] = []
        for name, factors in zip(late.before, followed, strict=True):
            if name in self._measured:
                resolutions.append(_measured(name, factors, factors.of))
                continue
            resolution = Resolution(factors.of, factors.objection)
            if factors.objection is None and name in numbers.views:
                explained = explain(numbers.views[name], factors.of, find_factor=False)
                resolution = Resolution(factors.of, explained.objection, explained.residual)
            resolutions.append(resolution)
        facts = gather_all_facts(late.owned, late.before, resolutions, late.context)
        step = StepInProgress(backwards=late.backwards)
        return PreparedStep(late.number, facts, self._annotated_calls(step, facts, late.number))

    def _followed(
        self, mine: Mapping[str, nn.Parameter], step: StepInProgress, *, skipped: bool, on_cpu: bool
    ) -> tuple[Sequence[Factors], Mapping[str, GradientSample | None]]:
        """Return what samples show of each gradient, as the step is about to take it, and the samples taken now."""
        if on_cpu and not skipped:
            histories, gradients = list(map(step.histories.get, mine)), [one.grad for one in mine.values()]
            found = follow_views(histories, self._check.views(mine), gradients)
            if found is not None:
                return found, {}
        seen = [self._seen(step.history(name, parameter), name, parameter, skipped) for name, parameter in mine.items()]
        samples = {name: final for name, (_, final) in zip(mine, seen, strict=True)}
        seen = seen if on_cpu else fetch_histories(seen)
        with one_thread():  # samples are small
            return follow_all(seen), samples

    def _live(
        self, owned: RecordedOptimizer, mine: Mapping[str, nn.Parameter], scale: float
    ) -> Mapping[str, LiveParameter]:
        """Return an optimizer's parameters as a sink takes them; one object for as long as nothing changes."""
        parameters, before, live = self._lives.get(id(owned), (None, 1.0, {}))
        if parameters is not mine or before != scale:
            live = {name: LiveParameter(parameter, owned.optimizer, scale) for name, parameter in mine.items()}
            self._lives[id(owned)] = mine, scale, live
        return live

    def _seen(self, history: GradientHistory, name: str, parameter: nn.Parameter, skipped: bool) -> Seen:
        """Return a gradient's history with its sample at the step; with none where the step will be skipped."""
        if skipped:
            return history, None
        projected = history.projected
        return history, self._check.sample(name, parameter, parameter.grad, projected=projected, look="at the step")

    def _explained(
        self,
        optimizer: str,
        mine: Mapping[str, nn.Parameter],
        step: StepInProgress,
        followed: Sequence[Factors],
        samples: Mapping[str, GradientSample | None],
        number: int,
        *,
        skipped: bool,
    ) -> list[Resolution]:
        """Return what is known of each parameter's gradient, those compared with their patterns that are to be."""
        kind = (optimizer, len(step.backwards), kind_of_factors(followed), frozenset(names_with_gradient(mine)))
        full = not skipped and self._schedule.is_full(number, kind)
        coarse = _has_coarse_calls(step)
        arrivals: dict[str, list[tuple[int, Arrival]]] = {}
        if full or coarse or [factors for factors in followed if factors.blind]:
            arrivals = arrivals_of(step.backwards)
        elif not self._measured:
            return _by_samples(followed)
        found = []
        for (name, parameter), factors in zip(mine.items(), followed, strict=True):
            calls = arrivals.get(name, [])
            if skipped or name not in self._exact:
                found.append(Resolution(factors.of, factors.objection))
            elif name in self._measured:
                found.append(self._measure(name, parameter, calls, factors))
            else:
                sample = samples.get(name)
                found.append(self._check.resolve(name, parameter, calls, factors, full=full, sample=sample))
        return found

    def _measure(
        self, name: str, parameter: nn.Parameter, calls: Sequence[tuple[int, Arrival]], factors: Factors
    ) -> Resolution:
        """Return what is known of a gradient that patterns need not explain: where no factor fits, it is 1."""
        found = factors.of
        if factors.blind:
            found = dict(self._check.resolve(name, parameter, calls, factors, full=False).factors)
        return _measured(name, factors, found)

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


def _has_coarse_calls(step: StepInProgress) -> bool:
    """Say whether autocast computed any call of a step."""
    return bool([one for back in step.backwards for one in back.calls if one.arrival.call.coarse is not None])


def arrivals_of(backwards: Sequence[Backward]) -> dict[str, list[tuple[int, Arrival]]]:
    """Return the accumulated calls of each parameter's layers, each with its micro."""
    arrivals: dict[str, list[tuple[int, Arrival]]] = {}
    for micro, backward in enumerate(backwards):
        for accumulated in backward.calls:
            for name in dict.fromkeys(name for name, _ in accumulated.arrival.call.layer.parameters.values()):
                arrivals.setdefault(name, []).append((micro, accumulated.arrival))
    return arrivals


def _measured(name: str, factors: Factors, found: Mapping[int, float]) -> Resolution:
    """Return what is known of a gradient that patterns need not explain: where no factor was found, it is 1.

    Args:
        name: the parameter's name.
        factors: what samples show of its gradient.
        found: micro -> the factor that was found, NaN where no one factor explains what happened.
    """
    if factors.objection == NOT_FINITE:
        raise RefusedError(f"Parameter {name!r} cannot be recorded: {NOT_FINITE}.")
    if all(map(math.isfinite, found.values())):
        return Resolution(found, None)
    return Resolution({micro: one if math.isfinite(one) else 1.0 for micro, one in found.items()}, None)


def _not_at_hand() -> float:
    raise AssertionError("the norm of a late step's gradient is read with its other numbers")


def _by_samples(followed: Sequence[Factors]) -> list[Resolution]:
    """Return what samples alone tell of gradients."""
    found: list[Resolution] = []
    before: Factors | None = None
    for factors in followed:
        found.append(found[-1] if factors is before else Resolution(factors.of, factors.objection))
        before = factors
    return found


def names_with_gradient(parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Return the names of the parameters that have a gradient."""
    return [name for name, parameter in parameters.items() if parameter.grad is not None]


def kind_of_factors(followed: Sequence[Factors]) -> FactorsKind:
    """Say what happened to the gradients of a step: nothing, one factor for all of them (clipping), or several."""
    found: set[float] = set()
    last: Factors | None = None
    for factors in followed:
        if factors is not last:
            found.update(factors.of.values())
            last = factors
    if found <= {1.0}:
        return "none"
    return "one" if max(found) - min(found) <= 1e-5 * max(map(abs, found)) else "several"
