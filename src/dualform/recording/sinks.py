"""What the recorder hands on, and the protocol of the object that takes it, a sink.

The disk writer (`dualform.store.writer`) is a sink. A sink sees patterns when they are accumulated, detached and
copied, and steps in the order in which they happened.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.identity.parameter_use import ParameterUse
from dualform.identity.unfolding import Unfolding
from dualform.recording.annotations import Binding
from dualform.recording.media import Files
from dualform.recording.model_state import StatePart
from dualform.recording.rowcheck import RowCheck
from dualform.recording.world import World

RESIDUAL = "residual"
"""A fact beside an optimizer's settings: how far patterns are from a gradient that autograd rounded coarsely."""
SAMPLE = 256  # elements of each parameter that fingerprint a step


@dataclass(frozen=True, slots=True)
class LayerStart:
    """A watched layer as it is described to a sink."""

    kind: str
    d_in: int
    d_out: int
    uses: tuple[ParameterUse, ...]
    keys_only: bool
    optional: bool = False  # whether it is no layer of the run when it has no patterns
    shares_only: bool = False  # whether its patterns are not kept, but only sums over groups of them
    unfolding: Unfolding | None = None  # how its keys repeat elements of its inputs; None where they do not


@dataclass(frozen=True, slots=True)
class DividedStart:
    """How a parameter is divided by rows among processes.

    Attributes:
        shape: the shape of the whole parameter.
        first: the number of this process's first row.
        sample: the sample of the whole parameter, as `sample` takes it.
    """

    shape: tuple[int, ...]
    first: int
    sample: Tensor


@dataclass(frozen=True, slots=True)
class Start:
    """What a recording starts from."""

    layers: Mapping[str, LayerStart]
    parameters: Mapping[str, Tensor]  # covered parameters as they are now
    states: Mapping[str, Mapping[str, Tensor]]  # optimizer state that is warm already: parameter -> entry -> tensor
    optimizers: tuple[str, ...]
    uncovered: Mapping[str, int]
    batch_axis: int
    state: Callable[..., Mapping[str, StatePart] | None] | None = None
    """`UncoveredState.parts`: the model's uncovered state as it is when called, on the training thread only."""
    devices: Mapping[str, torch.device] = field(default_factory=dict)  # where the covered parameters are; the CPU
    rank: int = 0  # the number of this process among those that train together
    processes: int = 1  # how many they are; each has a sink of its own, and all sinks one run
    divided: Mapping[str, DividedStart] = field(default_factory=dict)
    """Parameters of which `parameters`, `states` and what comes later have this process's rows alone, by name."""


class CallRecord(NamedTuple):
    """The patterns of one call of a layer, which one backward has just accumulated.

    Nobody writes to the tensors from now on, and their memory is not used again before everybody has let go of them:
    a sink may keep them, or views of them, for as long as it likes.
    """

    number: int  # among all calls that were handed over in this recording
    backward: int  # number of the backward among all of this recording that accumulated anything
    layer: str
    keys: Tensor  # (T, d_in), on the training device; or, with an `unfolding`, the inputs that they are patches of
    values: Tensor | None  # (T, d_out), on the training device
    raw: bool = False  # whether its keys owe nothing to the parameters, so that the same may come again
    unfolding: Unfolding | None = None  # for a `RepeatingSink`: how keys are taken from inputs, (B, channels, ...)
    first: Callable[[], list[Tensor]] | None = None
    """Of the first call of a backward: returns what it took and the errors that came, which are the user's tensors.

    A sink calls this at once or never, and keeps the record `without_first`, which would hold these tensors.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values in memory."""
        return self.keys.nbytes + (0 if self.values is None else self.values.nbytes)

    def without_first(self) -> "CallRecord":
        """Return the record as a sink keeps it."""
        return self if self.first is None else self._replace(first=None)

    @property
    def width(self) -> int:
        """The width of a key, d_in."""
        return self.keys.shape[1] * (1 if self.unfolding is None else math.prod(self.unfolding.kernel))


class StepCall(NamedTuple):
    """What a step knows of a call whose gradient reaches it: the call's place in the step, and its columns.

    The leading axes of the input are (outer, rows, inner) with the batch axis in the middle; positions = outer × inner.
    All this is known only at the step: rows and columns of a call depend on the other calls of its batch, and the order
    of a bias's sum on accumulations that come later in the same backward.
    """

    number: int  # of the `CallRecord`
    micro: int  # which backward of the step accumulated it
    call: int  # which call of its layer in that backward
    rows: int
    positions: int
    inner: int
    binding: Binding | None
    layout: str | None = None  # in which autograd added up its errors, SHAPE:STRIDES; None where row by row
    finite: bool = False  # whether NaN and infinity among its keys are to be taken for 0; see `keys_of`

    def keys_of(self, record: CallRecord) -> Tensor:
        """Return the keys of this call as the step uses them, (T, d_in), or the inputs that they are patches of.

        A weight gradient that is not finite may be zeroed before the step (`nan_to_num_`) while the bias of the same
        layer is trained on. The keys then multiply a factor of 0, but 0 · NaN is NaN in every sum; so they are 0.
        """
        if not self.finite or not record.keys.is_floating_point():
            return record.keys
        return torch.nan_to_num(record.keys, nan=0.0, posinf=0.0, neginf=0.0)


class ParameterFacts(NamedTuple):
    """What one step did to one parameter."""

    parameter: str
    optimizer: str
    updated: bool
    settings: Mapping[str, Any]
    factors: Sequence[float]  # per micro, what the gradient was multiplied with between backward and step


@dataclass(frozen=True, slots=True, eq=False)
class LiveParameter:
    """A covered parameter as its optimizer holds it. Nobody but the optimizer writes to it.

    Attributes:
        parameter: the parameter, with its gradient as the step takes it, but for `scale`.
        optimizer: the optimizer that trains it.
        scale: what the step still divides the gradient by (a fused step under a gradient scaler).
    """

    parameter: nn.Parameter
    optimizer: Optimizer
    scale: float = 1.0

    @property
    def state(self) -> Mapping[str, Any]:
        """The optimizer's state of the parameter, as it is now."""
        found: Mapping[str, Any] = self.optimizer.state.get(self.parameter, {})
        return found


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """One optimizer's part of a step, just before it moves its parameters."""

    step: int
    facts: Sequence[ParameterFacts]  # of the covered parameters that this optimizer trains
    calls: Sequence[StepCall]  # whose gradients reach the step through this optimizer or one that has stepped already
    live: Mapping[str, LiveParameter] = field(default_factory=dict)  # those parameters themselves


@dataclass(frozen=True, slots=True)
class StepFacts:
    """One optimizer step, after it: which calls reach it, its facts, and a sample of each parameter after it."""

    step: int
    calls: Sequence[StepCall]
    facts: Sequence[ParameterFacts]  # of every covered parameter
    samples: Mapping[str, Tensor]  # on the training device
    snapshot: Callable[[], dict[str, Tensor]]
    """Returns copies of all covered parameters, each on its device; valid until the next step."""
    rows: Mapping[str, RowCheck] = field(default_factory=dict)  # what is known by now of the layers' rows
    parameters: Mapping[str, Tensor] = field(default_factory=dict)  # the covered parameters, after the step


class Sink(Protocol):
    """Takes a recording: patterns as they are accumulated, facts at the step.

    Methods are called one at a time, on the thread that trains; `call` and `discard` also on a thread of autograd's,
    where a backward runs there, and `abandon` on any thread, where nobody refers to the recorder any more.

    A step goes `call` (any number) -> `before_step` -> `step` -> `discard`. Where the recording has several optimizers,
    `before_step` comes once for each of them; where an optimizer evaluates a closure, once for each evaluation, of
    which the last counts; and a step that failed in the optimizer is prepared and never taken.
    """

    def open(self, start: Start) -> int:
        """Begin, and return the number of the first step to come."""

    def updates(self) -> Mapping[str, int]:
        """Return how many updates of each parameter the run holds; asked where a run is continued."""

    def check(self, binding: Binding) -> None:
        """Raise `AnnotationError` where a batch's columns cannot join those of earlier batches."""

    def call(self, record: CallRecord) -> None:
        """Take the patterns of a call that was just accumulated; whether they reach a step is not known yet."""

    def before_step(self, prepared: PreparedStep) -> None:
        """Look at the parameters and the optimizer's state that the step is about to overwrite."""

    def step(self, facts: StepFacts) -> None:
        """Take a step. May wait; raises `StoreError` when an earlier step could not be kept.

        Its calls were all handed over before, and are not discarded yet. A call may be part of two steps, where two
        optimizers that share a layer step on their own.
        """

    def discard(self, backwards: Sequence[int]) -> None:
        """Let go of everything that these backwards accumulated: no step to come has any part of it.

        Either its step was taken, or the gradients were cleared without one. After the end of a recording, `close` or
        `abandon`, no backward is discarded any more: what is left then never reaches a step.
        """

    def state(self) -> Mapping[str, Any]:
        """Return what a later recording needs, beyond what is published, to go on from the last step."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take what `state` gave an earlier recording; called before `open`."""

    def attach(self, files: Files) -> None:
        """Take files that belong to the run but are no patterns: media, test examples."""

    def flush(self, snapshot: Callable[[], dict[str, Tensor]]) -> None:
        """Publish everything taken so far before returning."""

    def close(self, final: Mapping[str, Tensor]) -> None:
        """Publish everything, and the parameters as they are at the end."""

    def close_without_final(self, reason: str) -> None:
        """Publish everything, and why the parameters at the end are not those after the last step."""

    def find_step(self, parameters: Mapping[str, Tensor]) -> int | None:
        """Return the published step after which the parameters were these, or None; asked after closing."""

    def abandon(self) -> None:
        """Stop at once, keeping what is published already. May be called at any time, also more than once."""


@runtime_checkable
class LateSink(Protocol):
    """A sink that may get a step when the next one is about to be made, because numbers had to come from a GPU.

    For a late step `stepped` comes instead of `before_step`, just after the step, and `step` at the next one, before it
    moves any parameter; or never, where the step was refused. Where the model trains on the CPU no step is late.
    """

    def stepped(self, snapshot: Callable[[], dict[str, Tensor]]) -> None:
        """Note that a step was made: what belongs to this moment, such as a model's buffers, can be read now only."""


@runtime_checkable
class LateWatchingSink(LateSink, Protocol):
    """A late sink that needs to look at what a late step is about to overwrite."""

    def before_late_step(self, prepared: PreparedStep) -> None:
        """Look at the parameters and the optimizer's state that a late step is about to overwrite.

        The step's calls and its factors are not known yet: `prepared` has none.
        """


@runtime_checkable
class SelectiveSink(Protocol):
    """A sink that can do without the values of some layers: their calls may come with keys alone."""

    def wants_values(self, layer: str) -> bool:
        """Say whether the sink has a use for the values of a layer. Asked while a recording is open."""


@runtime_checkable
class RepeatingSink(Protocol):
    """A sink that takes the inputs of a convolution in place of its keys, which repeat elements of them many times."""

    def takes_inputs(self, layer: str) -> bool:
        """Say whether it does so with a layer that has an `unfolding`. Asked once, when it is open.

        A call of such a layer comes with its keys all the same where they have fewer elements than its inputs.
        """


@runtime_checkable
class AgreeingSink(Protocol):
    """A sink that has to hear from those of the other processes which train together, before every step."""

    def agree(self, world: World) -> None:
        """Exchange what a step needs of all processes; each calls this after `before_step`, if no process failed."""


@runtime_checkable
class WholeStepSink(Protocol):
    """A sink that may have no use for a step which an error broke off between the steps of two optimizers."""

    def needs_whole_steps(self) -> bool:
        """Say whether the steps will be made again by a replay, which makes each with all of its optimizers."""


def sample(parameter: Tensor) -> Tensor:
    """Return a fixed sample of a parameter's elements, to recognise a step by, (at most 2 · SAMPLE,)."""
    flat = parameter.detach().reshape(-1)
    return flat[:: max(1, len(flat) // SAMPLE)].clone()
