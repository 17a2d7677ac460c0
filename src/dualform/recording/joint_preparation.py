"""Preparing a step that several processes take together: the factors of all, one check of the reduced gradient.

Each process has its own calls; gradients, factors and facts are the same in all of them. Which steps are checked in
full is decided together, and what the patterns of all processes predict for a gradient is summed before it is compared.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from dualform.errors import RefusedError
from dualform.recording.agreement import sum_numbers
from dualform.recording.alignment import Alignment
from dualform.recording.check_schedule import CheckSchedule
from dualform.recording.divided import LiveRows, OwnRows, localized, whole_shape
from dualform.recording.gradient_check import GradientCheck, GradientView, PredictedSum, Resolution, compare_sum
from dualform.recording.gradient_history import Factors, Seen, fetch_histories
from dualform.recording.gradient_samples import GradientSample
from dualform.recording.joint_gradients import join_histories
from dualform.recording.optimizers import pending_scale
from dualform.recording.parameter_facts import StepContext, gather_all_facts, look_before_step
from dualform.recording.probes import COARSE_ROUNDING, Float64Array, as_float64, norm_of
from dualform.recording.recorded_optimizers import RecordedOptimizer
from dualform.recording.sinks import PreparedStep
from dualform.recording.step_in_progress import StepInProgress
from dualform.recording.step_preparation import (
    OnFailure,
    StepPreparation,
    arrivals_of,
    kind_of_factors,
    names_with_gradient,
)
from dualform.recording.user_warnings import WarnOnce
from dualform.recording.world import World
from dualform.threads import one_thread


class JointPreparation(StepPreparation):
    """Finds what a step of several processes will do, from what was accumulated for it in all of them."""

    def __init__(
        self,
        exact: Collection[str],
        measured: Collection[str],
        alignment: Alignment,
        check: GradientCheck,
        schedule: CheckSchedule,
        warn_once: WarnOnce,
        world: World,
        own_rows: Mapping[str, OwnRows],
        *,
        batch_axis: int,
        on_failure: OnFailure,
    ) -> None:
        """Prepare the steps of one recording.

        Arguments as `StepPreparation` has them, and the processes, and this process's rows of divided parameters.
        """
        super().__init__(
            exact, measured, alignment, check, schedule, warn_once, batch_axis=batch_axis, on_failure=on_failure
        )
        self._world = world
        self._own_rows = own_rows

    def prepare_together(
        self,
        owned: RecordedOptimizer,
        step: StepInProgress,
        number: int,
        *,
        on_cpu: bool,
        coarse: bool,
        look_first: Callable[[], object],
        then: Callable[[PreparedStep], object],
        state_mark: Callable[[], float] = lambda: 0.0,
    ) -> PreparedStep:
        """Return what an optimizer is about to do, or refuse; every process calls this for the same step.

        Args:
            owned: the optimizer.
            step: what was accumulated in this process, and what other optimizers did in the same step.
            number: how many steps were recorded before.
            on_cpu: whether all parameters are in the CPU's memory.
            coarse: whether the gradients may be rounded coarsely where they are reduced; the distance of each from its
                patterns is measured then, as under autocast.
            look_first: looks at the recording before everything else, and raises where the step cannot be recorded.
            then: takes the prepared step; the step is refused in all processes where it raises in one.
            state_mark: returns a number of the optimizers' state that has to be the same in all processes.
        """
        world, mine = self._world, localized(owned.parameters, self._own_rows)
        counts = {name: self._sample_count(name, parameter) for name, parameter in mine.items()}
        places = {name: _place(rows, counts[name]) for name, rows in self._own_rows.items() if name in mine}
        seen: dict[str, Seen] = {}

        scale, skipped = pending_scale(owned.optimizer)

        def look() -> Mapping[str, Seen]:
            look_first()
            found = [self._seen(step.history(name, one), name, one, skipped) for name, one in mine.items()]
            seen.update(zip(mine, found if on_cpu else fetch_histories(found), strict=True))
            return seen

        joint = join_histories(
            look,
            counts,
            world,
            number,
            micros=len(step.backwards),
            skipped=skipped,
            coarse=coarse,
            places=places,
            state_mark=state_mark,
        )
        seen.update({name: (seen[name][0], final) for name, final in joint.finals.items()})
        live = self._live(owned, owned.parameters, scale)
        rows = {name: self._own_rows[name] for name, final in joint.finals.items() if final is not None}
        live = {**live, **{name: LiveRows(one, owned.optimizer, scale) for name, one in rows.items()}}
        context = StepContext(self._explainable, step.graph_of, joint.micros, scale, skipped)
        step.graph_of = None
        followed: list[Factors] = []
        views: dict[str, GradientView] = {}
        predicted: dict[str, PredictedSum] = {}
        prepared: list[PreparedStep] = []

        def finish() -> None:
            resolutions = [
                self._resolve(name, one, views.get(name), predicted.get(name))
                for name, one in zip(mine, followed, strict=True)
            ]
            facts = gather_all_facts(owned, look_before_step(owned), resolutions, context)
            calls = self._annotated_calls(step, [*step.done.facts, *facts], number)
            prepared.append(PreparedStep(number, facts, calls, live))
            then(prepared[-1])

        def choose() -> list[bool]:
            with one_thread():  # samples are small
                followed.extend(joint.follow())
            kind = (owned.name, joint.micros, kind_of_factors(followed), frozenset(names_with_gradient(mine)))
            calls = [one.arrival.call for back in step.backwards for one in back.calls]
            rounded = coarse or any(call.coarse is not None for call in calls)
            full = not skipped and (self._schedule.is_full(number, kind) or rounded)
            objected = {name for name, one in zip(mine, followed, strict=True) if one.objection is not None}
            # Of a gradient that is refused the others are told that it is, and no prediction.
            if not full or not objected.isdisjoint(self._explainable):
                finish()
            return [full]

        if sum_numbers(world, 1, choose)[0]:
            names = [name for name in mine if name in self._explainable]
            sizes = [counts[name] + 3 for name in names]
            factors = dict(zip(mine, followed, strict=True))
            total = sum_numbers(
                world, sum(sizes), lambda: self._predictions(names, mine, step, seen, factors, counts, views)
            )
            for name, end, count in zip(names, np.cumsum(sizes).tolist(), sizes, strict=True):
                numbers = total[end - count : end]
                size, patterns, rounded = numbers[-3:].tolist()
                if coarse:
                    size *= COARSE_ROUNDING / torch.finfo(mine[name].dtype).eps
                found = functools.partial(float, size)
                predicted[name] = PredictedSum(numbers[:-3], found, int(patterns), coarse or bool(rounded))

            def finish_checked() -> list[float]:
                finish()
                return []

            sum_numbers(world, 0, finish_checked)
        return prepared[-1]

    def _sample_count(self, name: str, parameter: nn.Parameter) -> int:
        """Return the number of elements of a sample of a parameter's gradient."""
        columns, shape = self._check.columns(name, parameter), whole_shape(parameter)
        return shape.numel() if columns is None else shape[0] * columns.shape[1]

    def _predictions(
        self,
        names: Sequence[str],
        mine: Mapping[str, nn.Parameter],
        step: StepInProgress,
        seen: Mapping[str, Seen],
        factors: Mapping[str, Factors],
        counts: Mapping[str, int],
        views: dict[str, GradientView],
    ) -> Float64Array:
        """Return what this process's patterns predict for each gradient, and make a view of each gradient.

        For each parameter: the prediction, what its rounding is relative to, the number of patterns, and whether
        autocast rounded any of them.
        """
        arrivals = arrivals_of(step.backwards)
        found: list[Float64Array] = []
        for name in names:
            numbers = np.zeros(counts[name] + 3)
            found.append(numbers)
            parameter, final = mine[name], seen[name][1]
            gradient = parameter.grad
            if final is None or gradient is None:
                continue
            norm = functools.partial(_norm, gradient, final if name in self._own_rows else None)
            view = self._check.view(name, parameter, arrivals.get(name, []), final.elements, norm)
            views[name] = view
            for part in view.parts:
                factor = factors[name].of.get(part.micro, 0.0)
                if factor:
                    numbers[:-3] += factor * as_float64(part.columns)
                    numbers[-3:] += (abs(factor) * part.size(), part.patterns, part.coarse)
        return np.concatenate([np.zeros(0), *found])

    def _resolve(
        self, name: str, factors: Factors, view: GradientView | None, predicted: PredictedSum | None
    ) -> Resolution:
        """Return what is known of a gradient at the step, compared with all patterns where that was to be done."""
        if name in self._measured:
            if factors.objection is not None:
                raise RefusedError(f"Parameter {name!r} cannot be recorded: {factors.objection}.")
            return Resolution(factors.of, None)
        if factors.objection is not None or view is None or predicted is None:
            return Resolution(factors.of, factors.objection)
        explained = compare_sum(view, predicted)
        return Resolution(factors.of, explained.objection, explained.residual)


def _place(rows: OwnRows, count: int) -> slice:
    """Return where a process's rows lie among the elements of a sample with all rows."""
    per_row = count // max(1, rows.whole[0])
    return slice(rows.first * per_row, (rows.first + len(rows)) * per_row)


def _norm(gradient: Tensor, joined: GradientSample | None) -> float:
    """Return the norm of a gradient; of one that is divided by rows that of all rows, from its joined sample."""
    return float(norm_of(gradient.detach())) if joined is None else joined.size
