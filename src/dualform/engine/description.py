"""What was trained, in words and sizes: the part of a run's manifest that every reader of patterns needs."""

from collections.abc import Mapping
from dataclasses import dataclass

from dualform.store.format import LayerEntry as LayerEntry
from dualform.store.format import ParameterEntry as ParameterEntry


@dataclass(frozen=True, slots=True)
class RunDescription:
    """A training run as its patterns need it.

    Attributes:
        layers: the recorded layers by name, optional ones included.
        parameters: the covered parameters by name.
        optimizers: the names of the optimizers' classes.
        columns: the user's columns and their Arrow types.
        steps: how many optimizer steps there are.
        batch_axis: the leading axis of the model's inputs that counts the rows of a batch.
    """

    layers: Mapping[str, LayerEntry]
    parameters: Mapping[str, ParameterEntry]
    optimizers: tuple[str, ...]
    columns: Mapping[str, str]
    steps: int
    batch_axis: int = 0
