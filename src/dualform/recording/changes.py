"""Changes that no recorded step made: to parameters, to the modules that hold them, to the optimizers' state.

A recording adds up what the steps of the recorded optimizers do. Whatever else moves a parameter (an edit of `p.data`,
weight clipping, a checkpoint loaded in mid-run, another process) or breaks the optimizer's continuity is in no pattern.
So everything is compared before each step, and at closing, with what the last step left. This file refuses such changes
and words the warnings; what becomes of the recording is decided by the recorder.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from dualform.errors import RefusedError
from dualform.recording.baseline import Baseline, LaterComparison
from dualform.recording.continuity import Continuity, Places
from dualform.recording.parameter_samples import ParameterSamples
from dualform.recording.recorded_optimizers import RecordedOptimizer
from dualform.recording.watch import Watched

UNSTEPPED_BACKWARDS = 10
"""Number of backwards in a row without a step, though parameters move, after which a warning says so.

A few are ordinary: sharpness-aware minimisation and adversarial training move weights or inputs between two backwards.
"""

REMEDY = (
    "Let an optimizer that was handed to record() make every update (a hand-written SGD: torch.optim.SGD, with the "
    'rate set in group["lr"]), load checkpoints before record(), leave the layer out of layers=[...], or record its '
    'keys only (layers={...: "keys"}).'
)


class Changes:
    """Compares the model and its optimizers with what the last recorded step left of them."""

    def __init__(
        self,
        model: nn.Module,
        layers: Collection[Watched],
        parameters: Mapping[str, nn.Parameter],
        exact: Collection[str],
    ) -> None:
        self._parameters = parameters
        self._exact = exact
        self._places = Places(model, layers)
        self._baseline = Baseline(parameters, exact)
        self.kinds: Mapping[str, tuple[torch.dtype, torch.device]] = self._baseline.kinds  # after the last step
        self._continuity = Continuity(exact)
        self._began = 0  # number of steps when the recording began
        self._unstepped = 0  # backwards in a row whose gradients were cleared without a step
        self._refused = False  # whether an error has named a change since the last step

    def look(self, optimizers: Collection[RecordedOptimizer]) -> ParameterSamples:
        """Keep the parameters as they are before the run is opened; return their samples.

        Opening writes the initial weights, which takes a while: another process may train the same weights meanwhile.
        """
        samples = self._baseline.note(0, self._parameters)
        for owned in optimizers:
            self._baseline.note(id(owned.optimizer), owned.parameters)
        return samples

    def begin(self, optimizers: Collection[RecordedOptimizer], step: int, updates: Mapping[str, int] | None) -> None:
        """Keep the optimizers' state as it is when a recording begins.

        Args:
            optimizers: the recorded optimizers.
            step: how many steps the run holds already.
            updates: how many updates of each parameter it holds, where a run is resumed.
        """
        self._began = step
        self._continuity = Continuity(self._exact, updates=updates)
        for owned in optimizers:
            self._continuity.note(owned, owned.parameters, stepped=False)

    def forget_states(self) -> None:
        """Take any state of the optimizers at their next steps: the caller knows how to tell whether it is right."""
        self._continuity = Continuity(self._exact)

    def note(self, owned: RecordedOptimizer, parameters: Mapping[str, nn.Parameter]) -> ParameterSamples:
        """Keep everything as an optimizer's step left it; return the samples of its parameters."""
        self._unstepped = 0
        self._refused = False
        self._continuity.note(owned, parameters)
        return self._baseline.note(id(owned.optimizer), parameters)

    def check(self, owned: RecordedOptimizer, step: int) -> None:
        """Refuse the step that an optimizer is about to take if anything else than recorded steps changed something."""
        self._check_objects(owned, step)
        self.refuse(self.changed(), step)

    def check_later(self, owned: RecordedOptimizer, step: int) -> list[LaterComparison]:
        """As `check`, but leave the parameters' numbers to comparisons that are read later, and given to `refuse`."""
        self._check_objects(owned, step)
        return self._baseline.compare_later()

    def _check_objects(self, owned: RecordedOptimizer, step: int) -> None:
        """Refuse a step if modules, parameters or the optimizer's state are other objects, or were written to."""
        self._unstepped = 0
        if (exchanged := self._places.exchanged()) is not None:
            self._refused = True
            raise RefusedError(
                f"{exchanged} {between(step)}. End this recording before the exchange, and start another one, in a new "
                "folder, after it."
            )
        if (broken := self._continuity.broken(owned, owned.parameters)) is not None:
            raise RefusedError(
                f"{broken} {between(step)}: the recorded gradients do not lead to it. Load an optimizer's state before "
                "record(); to change it in mid-run, end this recording and start another one, in a new folder, after "
                'the change (it keeps the state that it begins with); or record keys only (layers={"*": "keys"}).'
            )

    def refuse(self, changed: Sequence[str], step: int) -> None:
        """Refuse a step before which parameters were changed; does nothing where none was."""
        if changed:
            self._refused = True
            raise RefusedError(
                f"{named(changed)} changed {between(step)} by something other than the recorded optimizer: an edit of "
                "p.data (weight clipping, an average copied back, hand-written updates), a checkpoint that was loaded, "
                f"another process, or an optimizer that was not handed to record(). {REMEDY}"
            )

    def is_converted(self, name: str, parameter: Tensor) -> bool:
        """Say whether a parameter has another dtype than after the last step, or is on another device."""
        return self._baseline.is_converted(name, parameter)

    def converted(self) -> list[str]:
        """Return the parameters that `is_converted` says it of."""
        return self._baseline.converted()

    def follow(self, name: str, step: int, *, pending: bool) -> None:
        """Go on with a model that was moved to another device; refuse another dtype, other values, or a move in a step.

        Args:
            name: a parameter that `is_converted`.
            step: the number of recorded steps.
            pending: whether gradients have been accumulated for the step to come.
        """
        self._refused = True
        dtype, now = self._baseline.dtype(name), self._parameters[name].dtype
        if now is not dtype:
            raise RefusedError(
                f"Parameter {name!r} was {dtype} and is {now} now: the model was converted (model.double(), .half(), "
                f".to(...)) {between(step)}. Convert it before record(), or end this recording and start another one, "
                "in a new folder, after the conversion."
            )
        if changed := self.changed():
            raise RefusedError(f"{named(changed)} changed {between(step)}, where the model was moved. {REMEDY}")
        if pending:
            raise RefusedError(
                f"Parameter {name!r} was moved to {self._parameters[name].device} between a backward and its step. "
                "Move the model before record(), or between a step and the next forward."
            )
        self._refused = False
        self._baseline.regroup()

    def changed(self) -> list[str]:
        """Return the parameters of exactly recorded layers that are not as the last step left them."""
        return self._baseline.changed()

    def at_closing(self, step: int, find: Callable[[], int | None]) -> str:
        """Return a warning of every change at the end of a recording; empty without any, or after an error named it.

        Args:
            step: the number of recorded steps.
            find: returns the recorded step after which the weights were what they are now, or None.
        """
        found = []
        if (exchanged := self._places.exchanged()) is not None:
            found.append(f"{exchanged} before the recording was closed; the memory describes the recorded one.")
        if step == self._began:
            if changed := self._baseline.changed(keys_only=True):
                found.append(_never_stepped(changed))
        elif changed := self.changed():
            found.append(_after_closing(changed, step, find()))
        return "" if self._refused else " ".join(found)

    def is_broken_off(self) -> bool:
        """Say whether any covered parameter is not as the last step left it, that of a keys-only layer included."""
        return bool(self._baseline.changed(keys_only=True))

    def unstepped(self) -> str | None:
        """Note that gradients were cleared without a step; return a warning, once, if that goes on and weights move."""
        self._unstepped += 1
        if self._unstepped != UNSTEPPED_BACKWARDS or not (changed := self._baseline.changed(keys_only=True)):
            return None
        return (
            f"{named(changed)} moved while the gradients of {self._unstepped} backwards in a row were cleared without "
            f"a step of the recorded optimizer, so that none of their patterns is recorded. {REMEDY}"
        )


def named(parameters: Sequence[str]) -> str:
    """Return a few names of parameters, and how many more there are.

    >>> named(["0.weight", "0.bias", "2.weight", "2.bias"])
    "Parameters '0.weight', '0.bias', '2.weight' and 1 more"
    """
    shown = ", ".join(map(repr, parameters[:3])) + (f" and {len(parameters) - 3} more" if len(parameters) > 3 else "")
    return f"Parameter{'s' if len(parameters) > 1 else ''} {shown}"


def between(step: int) -> str:
    """Return when something happened, after this many steps.

    >>> between(0), between(4)
    ('after the recording began and before step 1', 'between step 4 and step 5')
    """
    return f"between step {step} and step {step + 1}" if step else "after the recording began and before step 1"


def why_no_final(changed: Sequence[str], step: int) -> str:
    """Return why a run has no final weights, as its manifest says it."""
    return f"{named(changed)} had changed since step {step} when the recording was closed"


def _after_closing(changed: Sequence[str], step: int, found: int | None) -> str:
    """Return the warning that the weights at closing are not those after the last step.

    Args:
        changed: the parameters that differ.
        step: the number of recorded steps.
        found: the step after which the weights were these, if there is one.
    """
    then = "" if found is None else f" They are those after step {found} (memory.at(step={found}))."
    return (
        f"The weights at closing are not those after step {step}: {named(changed)} changed since, as when the best "
        f"checkpoint is loaded at the end of a training.{then} No final weights are kept; those after step {step} are "
        "rebuilt from the patterns when asked for."
    )


def _never_stepped(changed: Sequence[str]) -> str:
    """Return the warning that nothing was recorded, although the model was trained."""
    return (
        f"No optimizer step was recorded. Yet {named(changed)} changed: the optimizer that was handed to record() "
        "never stepped, and something else trained the model (hand-written updates, another optimizer or process, a "
        "checkpoint that was loaded). Hand record() the optimizer that trains; write hand-written SGD as "
        'torch.optim.SGD, with the rate set in group["lr"].'
    )


def many_evaluations(optimizer: str, count: int) -> str:
    """Return the warning that an optimizer evaluated its closure several times in one step."""
    return (
        f"{optimizer} evaluated its closure {count} times in one step; only the patterns of the last evaluation are "
        f"kept, here 1 of {count}, and so in every step. Call annotate() inside the closure, before its forward, "
        "so that they are annotated."
    )
