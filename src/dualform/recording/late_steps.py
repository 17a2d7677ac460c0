"""Steps whose numbers are read one step later, so that no step waits for a GPU.

Just before the step everything is taken that the optimizer or the user is about to overwrite: samples of the gradients,
what the patterns predict for them, the optimizer's settings. The numbers are small and go to the CPU's memory in one
copy. At the next step they have long arrived; then the step is found to be recordable, or is refused, one step late.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from dualform.recording.baseline import LaterComparison
from dualform.recording.gradient_check import GradientView, PredictedPart
from dualform.recording.gradient_history import (
    Factors,
    Seen,
    are_usual,
    follow_all,
    follow_joined,
    tensors_of,
    with_tensors,
)
from dualform.recording.gradient_samples import GradientSample
from dualform.recording.packing import NumbersUnderWay
from dualform.recording.parameter_facts import BeforeStep, StepContext
from dualform.recording.probes import Patches, norms_of
from dualform.recording.recorded_optimizers import RecordedOptimizer
from dualform.recording.step_in_progress import Backward


class JoinedSamples:
    """The samples of gradients that were all accumulated once, which most steps leave as they were.

    Attributes:
        parts: the elements of each after the backward, those at the step, and the norms of the gradients.
    """

    def __init__(self, seen: Sequence[Seen]) -> None:
        """Join the samples of histories that are `are_usual`."""
        self._seen = seen
        finals = [final for _, final in seen if final is not None]
        afters = [history.accumulations[0].after for history, _ in seen]
        self._counts = [final.elements.shape[0] for final in finals]
        norms = [final.norm for final in finals if final.norm is not None]
        self.parts = [[sample.elements for sample in afters], [sample.elements for sample in finals], norms]

    def follow(
        self, before: Tensor, now: Tensor, norms: Tensor, *, samples: bool
    ) -> tuple[Sequence[Factors], list[GradientSample | None]]:
        """Return what happened to each gradient, and where `samples` are wanted, its sample at the step.

        Args:
            before: the first of `parts` as one tensor in the CPU's memory, as are the others.
            now: the second of `parts`.
            norms: the third of `parts`.
            samples: whether the samples at the step are wanted.
        """
        same = np.array_equal(before.numpy(), now.numpy())
        begins = np.cumsum([0, *self._counts[:-1]])
        shown = same and bool((np.logical_or.reduceat(now.numpy() != 0, begins) | (norms.numpy() == 0)).all())
        unchanged = shown and bool(np.isfinite(norms.numpy()).all())
        if unchanged and not samples:
            return [Factors({history.accumulations[0].micro: 1.0}) for history, _ in self._seen], []
        if not samples and not same:
            arrays = before.double().numpy(), now.double().numpy(), norms.double().numpy()
            found = follow_joined(self._seen, *arrays)
            if found is not None:
                return found, []
        here = iter(
            [
                tensor
                for one in zip(before.split(self._counts), now.split(self._counts), norms.unbind(), strict=True)
                for tensor in one
            ]
        )
        seen = with_tensors(self._seen, here)
        return follow_all(seen), [final for _, final in seen]


@dataclass(frozen=True, slots=True)
class LateNumbers:
    """The numbers of a late step in the CPU's memory.

    Attributes:
        followed: what happened to each gradient between its backwards and the step.
        views: parameter -> its gradient beside its patterns' predictions, where they are to be compared.
        changed: the parameters that something else than recorded steps has changed before the step.
    """

    followed: Sequence[Factors]
    views: Mapping[str, GradientView]
    changed: Sequence[str]


class LateStep:
    """A step that an optimizer is about to make, or has made, and whose numbers are still on their way.

    Attributes:
        number: of the step.
        owned: the optimizer.
        before: parameter -> what was read of it just before the step.
        context: what is the same for all parameters of the step.
        backwards: what was accumulated for the step.
    """

    def __init__(
        self,
        number: int,
        owned: RecordedOptimizer,
        before: Mapping[str, BeforeStep],
        context: StepContext,
        backwards: Sequence[Backward],
        seen: Sequence[Seen],
        views: Mapping[str, GradientView],
        comparisons: Sequence[LaterComparison],
    ) -> None:
        """Start to copy the numbers of a step.

        Args:
            number: see the class.
            owned: see the class.
            before: see the class.
            context: see the class.
            backwards: see the class.
            seen: each gradient's history, and its sample at the step with its norm.
            views: parameter -> its gradient beside its patterns' predictions, where they are to be compared.
            comparisons: of the parameters with what the last step left of them.
        """
        self.number, self.owned, self.before, self.context = number, owned, before, context
        self.backwards = list(backwards)
        self._seen, self._views, self._comparisons = seen, views, comparisons
        measured = _measured(views)
        self._norms = {key: i for i, key in enumerate(measured)}
        columns = [part.columns for view in views.values() for part in view.parts]
        differs = [one.differs for one in comparisons if one.differs is not None]
        self._joined = JoinedSamples(seen) if are_usual(seen) else None
        samples: Sequence[Tensor | Sequence[Tensor]]
        samples = tensors_of(seen) if self._joined is None else self._joined.parts
        self._numbers = NumbersUnderWay([*samples, *norms_of(list(measured.values())), *columns, *differs])

    def read(self) -> LateNumbers:
        """Return the numbers, waiting until they have arrived."""
        here = iter(self._numbers.read())
        finals: list[GradientSample | None]
        if self._joined is not None:
            followed, finals = self._joined.follow(next(here), next(here), next(here), samples=bool(self._views))
        else:
            seen = with_tensors(self._seen, here)
            followed, finals = follow_all(seen), [final for _, final in seen]
        norms = [float(next(here)) for _ in self._norms]
        views = {}
        at = {name: i for i, name in enumerate(self.before)} if self._views else {}
        for name, view in self._views.items():
            final = finals[at[name]]
            assert final is not None, "a gradient that is compared was there"
            assert final.norm is not None, "the norm of every gradient is taken"
            views[name] = GradientView(
                final.elements,
                self._parts_here(view, norms, here),
                functools.partial(float, final.norm),
                view.width,
                view.dtype,
            )
        changed = [
            name for one in self._comparisons if one.differs is None or bool(next(here)) for name in one.changed()
        ]
        return LateNumbers(followed, views, changed)

    def _parts_here(self, view: GradientView, norms: Sequence[float], here: Iterator[Tensor]) -> list[PredictedPart]:
        """Return the predictions for a gradient with numbers in the CPU's memory."""
        found = []
        for part in view.parts:
            keys = part.prediction.keys
            norm = None if keys is None else norms[self._norms[id(keys)]]
            size = part.prediction.size_of(norms[self._norms[id(part.prediction.values)]], norm)
            found.append(replace(part, columns=next(here), size=lambda size=size: size))  # type: ignore[misc]
        return found


def _measured(views: Mapping[str, GradientView]) -> dict[int, Tensor]:
    """Return the keys and values whose norms say how large the rounding of predictions may be, each once, by id."""
    return {
        id(rows): rows.rows() if isinstance(rows, Patches) else rows
        for view in views.values()
        for part in view.parts
        for rows in (part.prediction.values, part.prediction.keys)
        if rows is not None
    }
