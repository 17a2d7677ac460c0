"""What was trained, in words and sizes: the part of a run's manifest that every reader of patterns needs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from dualform.identity.parameter_use import ParameterUse
from dualform.identity.unfolding import Unfolding
from dualform.recording.rowcheck import Outcome

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
"""A number of things. No file of a run holds as many as 2⁵³."""
Shape = tuple[Count, ...]
Stored = Literal["keys+values", "keys", "shares", "steps"]
"""What is stored of a layer. With "shares" its patterns are not: sums over groups of them are all there is.

With "steps" they are not either: they come back when the training is replayed.
"""


@dataclass(frozen=True, slots=True)
class LayerEntry:
    """A recorded layer: what it is and what is stored of it."""

    kind: str
    d_in: Count
    d_out: Count
    uses: tuple[ParameterUse, ...]  # how the layer uses each of its parameters
    store: Stored
    dtype: str  # of the stored keys and values
    optional: bool = False  # whether readers leave it out when it has no patterns
    unfolding: Unfolding | None = None  # how its keys are taken from inputs that are stored in their place

    @property
    def has_values(self) -> bool:
        """Whether there are patterns with values to ask for: stored ones, or ones that a replay brings back."""
        return self.store in ("keys+values", "steps")

    @property
    def parameters(self) -> dict[str, str]:
        """The name of the parameter of each use, by the use's name."""
        return {use.name: use.parameter for use in self.uses}


@dataclass(frozen=True, slots=True)
class ParameterEntry:
    """A covered parameter."""

    shape: Shape
    dtype: str


@dataclass(frozen=True, slots=True)
class RowsEntry:
    """What is known of a layer's rows: whether they are those of the batches that were annotated."""

    outcome: Outcome
    reason: str


@dataclass(frozen=True, slots=True)
class TrainingEntry:
    """The training of a run as a function that can be called again.

    Attributes:
        function: `"package.module:function"`, which takes what opens a recording; None where it has no such name.
        seconds: how long the recorded training took, from its start to its last published step.
        surroundings: settings of the machine and of torch on which the bits of a training depend, by name.
    """

    function: str | None = None
    seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    surroundings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunDescription:
    """A training run as its patterns need it.

    Attributes:
        layers: the recorded layers by name, optional ones included.
        parameters: the covered parameters by name.
        optimizers: the names of the optimizers' types, `module:qualname`; bare class names in old runs.
        columns: the user's columns and their Arrow types.
        steps: how many optimizer steps there are.
        batch_axis: the leading axis of the model's inputs that counts the rows of a batch.
        uncovered: trained parameters that no layer covers, and their numbers of elements.
        rows: what is known of the rows of the layers that were tried.
        closed: whether the recording came to its end.
        no_final: why a closed run has no final parameters; empty where it has.
        created: when the recording began, as an ISO date.
        versions: the versions of what recorded it.
        factory: `"package.module:function"` that makes the model, where it is known.
        factory_arguments: the arguments of the factory.
        training: how to run the training again, where it is known.
        processes: the largest number of processes that recorded the run together.
    """

    layers: Mapping[str, LayerEntry]
    parameters: Mapping[str, ParameterEntry]
    optimizers: tuple[str, ...]
    columns: Mapping[str, str]
    steps: int
    batch_axis: int = 0
    uncovered: Mapping[str, int] = field(default_factory=dict)
    rows: Mapping[str, RowsEntry] = field(default_factory=dict)
    closed: bool = True
    no_final: str = ""
    created: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    factory: str | None = None
    factory_arguments: Mapping[str, Any] = field(default_factory=dict)
    training: TrainingEntry | None = None
    processes: int = 1
