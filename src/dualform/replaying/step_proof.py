"""Is a second run of a training the first? Its start and every step are compared with the marks that the run keeps.

Two runs of one function are equal to the bit as long as nothing differs; the first difference is found in the step
where it comes up, and described by its place, its size and its usual causes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dualform.engine.description import LayerEntry
from dualform.engine.proofs import (
    ParameterMark,
    ParameterMarker,
    digest_annotations,
    digest_calls,
    mark_checksum,
    unpack_mark,
)
from dualform.errors import ReplayError
from dualform.identity.families.naming import same_optimizer
from dualform.recording.sinks import ParameterFacts, Start, StepCall
from dualform.recording.surroundings import find_surroundings
from dualform.replaying.logged_steps import LoggedSteps
from dualform.store.reader import Run

What = Literal["start", "calls", "annotations", "inputs", "settings", "parameters", "backwards", "length"]
FACTOR_TOLERANCE = 1e-4
"""How far the measured factor of a gradient may be from the recorded one, relative to it."""
_SEED = "a generator that is not seeded inside the training function"
_REASONS: Mapping[What, tuple[str, ...]] = {
    "start": (f"{_SEED}, or seeded with another number", "weights that are loaded from another file"),
    "calls": ("batches of another size, or in another order", "another model, or other options of the recording"),
    "annotations": (f"batches in another order: {_SEED} of the loader", "other data"),
    "inputs": (f"batches in another order, or augmented at random: {_SEED} of the loader", "other data"),
    "settings": ("another learning rate, schedule or clipping",),
    "parameters": (
        f"dropout or noise: {_SEED}",
        "kernels that are not deterministic: torch.use_deterministic_algorithms(True) refuses them",
        "other hardware, another version of torch, or another number of threads",
        "other targets or another loss",
    ),
    "backwards": ("micro-batches, or the rows of two processes, that have changed places", "other targets"),
    "length": ("another number of epochs, or a training that was cut off",),
}


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between a replay and the recorded training.

    Attributes:
        what: the thing that differs.
        step: the step, counted from 0, in which it came up; None where it was there before the first.
        detail: what was recorded, and what came, in words.
        parameter: the parameter that differs most, relative to its size.
        size: about how far it is from the recorded parameter, ‖difference‖.
        relative: `size` relative to ‖recorded parameter‖.
        changed: settings of the machine and of torch that are not those of the recording, in words.
    """

    what: What
    step: int | None
    detail: str
    parameter: str | None = None
    size: float = 0.0
    relative: float = 0.0
    changed: tuple[str, ...] = ()

    def __str__(self) -> str:
        when = "before its first step" if self.step is None else f"in step {self.step}"
        reasons = [*self.changed, *_REASONS[self.what]]
        return f"The replay is not the recorded training: {when}, {self.detail}. Usual reasons: {'; '.join(reasons)}."


class StepProof:
    """Compares a replay with a recorded run."""

    def __init__(self, run: Run, rank: int = 0) -> None:
        """Compare with what a process of the recording has marked, given by its number among several."""
        self._run = run
        training = run.description.training
        before, now = {} if training is None else training.surroundings, find_surroundings()
        self._changed = tuple(
            f"{name}: {before[name]} when it was recorded, {now[name]} now"
            for name in before
            if name in now and before[name] != now[name]
        )
        self._facts = LoggedSteps(run, run.shards)
        own = run.others[rank - 1] if rank else None
        self._marks = self._facts if own is None else LoggedSteps(run, own.shards)

    def check_start(self, start: Start) -> Difference | None:
        """Compare the model and the optimizers before the first step; raise where they are others altogether."""
        self._require_same_network(start)
        recorded = {name: _own_rows(start, name, tensor) for name, tensor in self._run.initial.items()}
        states = self._run.initial_states
        apart = {name: _distance(recorded[name], tensor) for name, tensor in start.parameters.items()}
        if any(size for size, _ in apart.values()):
            name = max(apart, key=lambda one: apart[one][1])
            return self._difference("start", None, f"parameter {name!r} starts elsewhere", name, *apart[name])
        for name, state in start.states.items():
            for entry, tensor in state.items():
                before = states.get(name, {}).get(entry)
                if before is None or not torch.equal(_own_rows(start, name, before).to(tensor), tensor.cpu()):
                    return self._difference("start", None, f"the optimizer's {entry} of {name!r} starts elsewhere")
        return None

    def _require_same_network(self, start: Start) -> None:
        """Raise where the replay has other layers or other optimizers than the recorded training."""
        description = self._run.description
        self._require_same_layers(description.layers, start)
        for before, now in zip(description.optimizers, start.optimizers, strict=False):
            if len(description.optimizers) != len(start.optimizers) or not same_optimizer(before, now):
                raise ReplayError(f"The replay trains with {now}; recorded was {before}. Give the recorded training.")

    def _require_same_layers(self, recorded: Mapping[str, LayerEntry], start: Start) -> None:
        for name in {**recorded, **start.layers}:
            before, now = recorded.get(name), start.layers.get(name)
            if before is None or now is None:
                which = "has no" if now is None else "has another"
                raise ReplayError(f"The replay {which} layer {name!r}. Give the training function of this very run.")
            if (before.kind, before.d_in, before.d_out, before.uses) != (now.kind, now.d_in, now.d_out, now.uses):
                raise ReplayError(
                    f"Layer {name!r} is {now.kind} {now.d_in} -> {now.d_out} in the replay; recorded was {before.kind} "
                    f"{before.d_in} -> {before.d_out}. Give the training function of this very run."
                )

    def check_restart(self, start: Start, step: int) -> Difference | None:
        """Compare the parameters of a training that starts in the middle with those after the step before."""
        self._require_same_network(start)
        row = self._marks.find(step - 1)
        if row is None:
            return None  # a step that moved no recorded parameter
        marker = ParameterMarker()
        checksums = {name: mark_checksum(parameter) for name, parameter in start.parameters.items()}

        def mark_of(name: str) -> ParameterMark:
            return unpack_mark(marker.measure({name: start.parameters[name]})[name])

        return self._parameters_difference(step - 1, row, len(start.parameters), checksums, mark_of)

    def check_step(
        self,
        step: int,
        calls: Sequence[tuple[str, StepCall]],
        inputs: Sequence[int],
        backwards: Sequence[int],
        facts: Sequence[ParameterFacts],
        checksums: Mapping[str, int],
        mark_of: Callable[[str], ParameterMark],
    ) -> Difference | None:
        """Compare a step: its calls, annotations and inputs, the settings, the parameters after it, and its backwards.

        Args:
            step: the number of the step.
            calls: the step's calls, each with its layer.
            inputs: the checksums of the keys that owe nothing to the parameters.
            backwards: the checksums of what the first call of each backward took, and of its errors.
            facts: what the step did to each parameter.
            checksums: the checksum of each parameter after the step.
            mark_of: returns the mark of a parameter after the step, to find how far it is off.
        """
        row, fact_row = self._marks.find(step), self._facts.find(step)
        logged = self._marks.rows
        if row is None or fact_row is None:
            return None  # a step that moved no recorded parameter
        if logged["calls_digest"][row] != digest_calls(calls):
            return self._difference("calls", step, "the layers were called with other numbers of rows, or other layers")
        if logged["annotations_digest"][row] != digest_annotations(calls):
            return self._difference("annotations", step, "the annotations are not those that were recorded")
        if logged["inputs"][row] != list(inputs):
            return self._difference("inputs", step, "the network's inputs are not those that were recorded")
        if found := self._settings_difference(step, fact_row, facts):
            return found
        if found := self._parameters_difference(step, row, len(facts), checksums, mark_of):
            return found
        if "backwards" in logged and logged["backwards"][row] != list(backwards):  # the first runs have no such marks
            detail = "its backwards are others than those that were recorded, though their sum is the same"
            return self._difference("backwards", step, detail)
        return None

    def known_factors(self, step: int) -> Mapping[str, Sequence[float]]:
        """Return what the gradient of each backward was multiplied with in a recorded step, by parameter."""
        row = self._facts.find(step) if step < self._run.steps else None
        if row is None:
            return {}
        steps, names, factors = (self._facts.rows[name] for name in ("step", "parameter", "factors"))
        found = {}
        while row < len(steps) and steps[row] == step:
            found[names[row]] = factors[row]
            row += 1
        return found

    def check_length(self, steps: int) -> Difference | None:
        """Compare the number of steps at the end of a replay."""
        recorded = self._run.steps
        if steps == recorded:
            return None
        return self._difference("length", min(steps, recorded), f"it took {steps} steps; recorded were {recorded}")

    def _settings_difference(self, step: int, row: int, facts: Sequence[ParameterFacts]) -> Difference | None:
        logged = self._facts.rows
        names = self._facts.setting_names
        for at, fact in enumerate(facts, start=row):
            if at >= len(logged["step"]) or (logged["step"][at], logged["parameter"][at]) != (step, fact.parameter):
                return self._difference("settings", step, f"the optimizer's groups are others at {fact.parameter!r}")
            if logged["updated"][at] != fact.updated or not _near(logged["factors"][at], fact.factors):
                detail = f"the gradient of {fact.parameter!r} reaches the step otherwise"
                return self._difference("settings", step, detail, fact.parameter)
            if self._facts.settings[at] == fact.settings:
                continue
            for name in names:
                logged_setting, setting = logged[name][at], fact.settings.get(name)
                if not _same(logged_setting, setting):
                    detail = f"{name} of {fact.parameter!r} is {setting}; recorded was {logged_setting}"
                    return self._difference("settings", step, detail, fact.parameter)
        return None

    def _parameters_difference(
        self,
        step: int,
        row: int,
        count: int,
        checksums: Mapping[str, int],
        mark_of: Callable[[str], ParameterMark],
    ) -> Difference | None:
        worst: tuple[float, float, str] | None = None
        logged = self._marks.rows
        for at in range(row, row + count):
            name = logged["parameter"][at]
            if logged["checksum"][at] != checksums[name]:
                before = ParameterMark(logged["checksum"][at], tuple(logged["projections"][at]))
                size = before.distance(mark_of(name))
                norm = before.distance(ParameterMark(0, (0.0,) * len(before.projections)))
                found = (size / norm if norm else np.inf if size else 0.0, size, name)
                worst = found if worst is None else max(worst, found)
        if worst is None:
            return None
        relative, size, name = worst
        detail = f"parameter {name!r} is off by about {size:.1e} ({relative:.1e} of its size) after it"
        return self._difference("parameters", step, detail, name, size, relative)

    def _difference(
        self,
        what: What,
        step: int | None,
        detail: str,
        parameter: str | None = None,
        size: float = 0.0,
        relative: float = 0.0,
    ) -> Difference:
        return Difference(what, step, detail, parameter, size, relative, self._changed)


def _near(before: Sequence[float], now: Sequence[float]) -> bool:
    """Say whether the factors of a gradient are the recorded ones, about.

    A factor is measured, on more elements in a step that is checked in full; parameters tell every bit.
    """
    if before is now:
        return True
    return len(before) == len(now) and np.allclose(before, now, rtol=FACTOR_TOLERANCE, equal_nan=True)


def _same(before: Any, now: Any) -> bool:
    """Say whether a setting is the logged one; a cell without a value stands for a setting that is not there."""
    if before is None or now is None:
        return (before is None or before != before) and (now is None or now != now)
    return bool(before == now) or (before != before and now != now)


def _own_rows(start: Start, name: str, whole: Tensor) -> Tensor:
    """Return of a recorded parameter, or of its state, the rows that a process has where it is divided by rows."""
    divided = start.divided.get(name)
    if divided is None or tuple(whole.shape) != tuple(divided.shape):
        return whole
    return whole[divided.first : divided.first + len(start.parameters[name])]


def _distance(recorded: Tensor, now: Tensor) -> tuple[float, float]:
    """Return how far a parameter is from the recorded one, and relative to it; 0 where they are equal to the bit."""
    if recorded.dtype == now.dtype and torch.equal(recorded, now):
        return 0.0, 0.0
    size = float((recorded.double() - now.double()).norm())
    norm = float(recorded.double().norm())
    return size or float("nan"), size / norm if norm else float("inf")
