"""What the recorder hands on, and the protocol of whoever takes it.

The disk writer (`dualform.store.writer`) is one. A sink sees only steps that happened, in order, detached and copied.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from dualform.identity.parameter_use import ParameterUse
from dualform.recording.annotations import Binding
from dualform.recording.media import Files
from dualform.recording.model_state import StatePart
from dualform.recording.rowcheck import RowCheck
from dualform.recording.spares import Spares
from dualform.recording.transfer import Brought

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


@dataclass(frozen=True, slots=True)
class CallRecord:
    """The patterns of one call of a layer in one backward.

    The leading axes of the input are (outer, rows, inner) with the batch axis in the middle; positions = outer × inner.
    """

    layer: str
    micro: int
    call: int
    rows: int
    positions: int
    inner: int
    keys: Tensor  # (rows × positions, d_in)
    values: Tensor | None  # (rows × positions, d_out)
    binding: Binding | None
    raw: bool = False  # whether its keys owe nothing to the parameters, so that the same may come again
    layout: str | None = None  # in which autograd added up its errors, SHAPE:STRIDES; nothing where row by row

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values in memory."""
        return self.keys.nbytes + (0 if self.values is None else self.values.nbytes)


@dataclass(frozen=True, slots=True)
class ParameterFacts:
    """What one step did to one parameter."""

    parameter: str
    optimizer: str
    updated: bool
    settings: Mapping[str, Any]
    factors: Sequence[float]  # per micro, what the gradient was multiplied with between backward and step


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step: its patterns, its facts, and a sample of each parameter after it."""

    step: int
    calls: Sequence[CallRecord]
    facts: Sequence[ParameterFacts]
    samples: Mapping[str, Tensor]
    snapshot: Callable[[], dict[str, Tensor]]  # copies of all covered parameters, valid until the next step
    spares: Spares | None = None  # where the memory of its patterns may go when it is done with
    brought: Brought | None = None  # its patterns and samples on their way from a GPU
    rows: Mapping[str, RowCheck] = field(default_factory=dict)  # what is known by now of the layers' rows

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values in memory."""
        return sum(call.nbytes for call in self.calls)

    def wait(self) -> None:
        """Return when its patterns and samples are here: they may be on their way from a GPU."""
        if self.brought is not None:
            self.brought.wait()

    def release(self) -> None:
        """Give back the memory of its patterns: a sink that is done with them and calls this may not look again."""
        if self.brought is not None:
            self.brought.release()
        elif self.spares is not None:
            for call in self.calls:
                self.spares.give([call.keys] if call.values is None else [call.keys, call.values])


class Sink(Protocol):
    """Takes the records of a run."""

    def open(self, start: Start) -> int:
        """Begin, and return the number of the first step to come."""

    def updates(self) -> Mapping[str, int]:
        """Return how many updates of each parameter the run holds; asked where a run is continued."""

    def check(self, binding: Binding) -> None:
        """Raise `AnnotationError` where a batch's columns cannot join those of earlier batches."""

    def write(self, record: StepRecord) -> None:
        """Take a step. May wait; raises `StoreError` when an earlier step could not be kept.

        A sink calls the record's `wait` before it looks at tensors, and may call `release` when it is done with them.
        """

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
        """Stop at once, keeping what is published already."""


def sample(parameter: Tensor) -> Tensor:
    """Return a fixed sample of a parameter's elements, to recognise a step by, (at most 2 · SAMPLE,)."""
    flat = parameter.detach().reshape(-1)
    return flat[:: max(1, len(flat) // SAMPLE)].clone()
