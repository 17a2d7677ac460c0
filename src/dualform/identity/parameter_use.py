"""How a layer uses one of its parameters, as data: which parameter map, between which slices of keys and values.

A layer has a tuple of uses. They are written to the manifest of a run and read from there, so they hold nothing but
names and whole numbers. The mathematics is in `parameter_maps.py`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from dualform.errors import FormatError
from dualform.identity.parameter_maps import PARAMETER_MAPS, ParameterMap, TransposedKernelMap
from dualform.identity.sliced_map import SlicedMap

Span = tuple[int, int]
"""A range of columns, elements or rows: the first one, and the one behind the last."""


@dataclass(frozen=True, slots=True)
class ParameterUse:
    """How a layer uses one parameter.

    >>> import torch
    >>> use = ParameterUse("weight_ih", "lstm.weight_ih_l0", "outer", keys=(0, 1))
    >>> use.parameter_map.gradient(torch.ones(1, 2), torch.tensor([[3.0, 4.0]]), (2, 1))
    tensor([[3.],
            [3.]])

    Attributes:
        name: the use's name, unlike that of every other use in the same layer: "weight", "bias", "weight_ih".
        parameter: the parameter's name, in the module where a layer kind describes the use, and in the whole model
            where the layer is recorded.
        map: the name of the parameter map, one of `PARAMETER_MAPS`.
        keys: the columns of a key that the parameter takes, or None for all.
        values: the elements of a value that the parameter takes, one span after the other; empty for all.
        value_width: the width of a whole value; given with `values` only.
        rows: the rows of the parameter that the layer uses, or None for all.
        groups: the number of groups of a transposed convolution, which the shape of its kernel does not tell; None for
            one group, and for every other map.
    """

    name: str
    parameter: str
    map: str
    keys: Span | None = None
    values: tuple[Span, ...] = ()
    value_width: int | None = None
    rows: Span | None = None
    groups: int | None = None

    def __post_init__(self) -> None:
        if self.map not in PARAMETER_MAPS:
            raise FormatError(
                f"Parameter {self.parameter!r} is used by the map {self.map!r}; known are {', '.join(PARAMETER_MAPS)}. "
                "Use a newer dualform."
            )
        spans = [span for span in (self.keys, *self.values, self.rows) if span is not None]
        width = self.value_width or 0
        if any(not 0 <= start < stop for start, stop in spans) or any(stop > width for _, stop in self.values):
            raise FormatError(
                f"Parameter {self.parameter!r} is used in ranges that cannot be: {self}. Each needs 0 <= start < stop, "
                "and those of values end within value_width. Restore the manifest from a copy of the run."
            )
        if self.groups is not None and (self.map != "transposed_kernel" or self.groups < 2):
            raise FormatError(
                f"Parameter {self.parameter!r} is used in {self.groups} groups by the map {self.map!r}; expected at "
                "least 2, and the map 'transposed_kernel'. Restore the manifest from a copy of the run."
            )

    @property
    def parameter_map(self) -> ParameterMap:
        """The parameter map, between the use's slices."""
        return _parameter_map(self.map, self.keys, self.values, self.value_width, self.rows, self.groups)


def takes_ids(uses: Iterable[ParameterUse]) -> bool:
    """Say whether a layer's keys are row numbers of one of its parameters, and not vectors."""
    return any(use.parameter_map.takes_ids for use in uses)


def matrix_and_bias(uses: Iterable[ParameterUse]) -> tuple[ParameterUse | None, ParameterUse | None] | None:
    """Return the uses of W and b where a layer is z = W x + b with whole keys and values, or None where it is not.

    W is stored as (d_out, d_in). Either of the two may be missing. A pattern contributes its value times one number
    then, whatever the output unit.
    """
    matrix: ParameterUse | None = None
    bias: ParameterUse | None = None
    for use in uses:
        if use.parameter_map.is_plain_matrix and matrix is None:
            matrix = use
        elif use.parameter_map.is_plain_bias and bias is None:
            bias = use
        else:
            return None
    return matrix, bias


@cache
def _parameter_map(
    name: str,
    keys: Span | None,
    values: tuple[Span, ...],
    value_width: int | None,
    rows: Span | None,
    groups: int | None,
) -> ParameterMap:
    """Return a parameter map by name, in groups and restricted to slices where any are given."""
    whole = PARAMETER_MAPS[name] if groups is None else TransposedKernelMap(groups)
    if keys is None and not values and rows is None:
        return whole
    return SlicedMap(
        whole,
        keys=None if keys is None else slice(*keys),
        values=[slice(*span) for span in values],
        value_width=value_width,
        rows=None if rows is None else slice(*rows),
    )
