"""Modules that multiply their input by a parameter or add one, element by element: recognised by what they compute.

Layer scales (`x * gamma`), affine modules (`x * alpha + beta`), added biases and learned position tables (`x + table`)
are small modules that every project writes for itself. A module is recorded as one of them if it has no children, its
`forward` takes one argument, and a copy of it with random parameters computes just that for random inputs, in training
and in evaluation, and leaves its input as it is. Any other module is left alone, and its parameters are reported as not
covered.

Two kinds are recognised:

- `Elementwise`, `z = factor ⊙ x + shift`: one number per element of one axis. The key is the input, as for the affine
  part of a normalisation; without a factor it is the constant 1.
- `PositionTable`, `z = x + table[position]`: the key is the position, an integer that names a row of the table, as a
  token names a row of an embedding. A shorter input takes the first rows.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from dualform.identity.parameter_use import ParameterUse
from dualform.recording.generators import untouched_generators
from dualform.recording.layers.layer_kind import LayerKind, recognises
from dualform.recording.layers.module_trials import RANKS, ModuleTrial, TriedKind, tried_parameters


class Elementwise(TriedKind):
    """z = factor ⊙ x + shift along one axis of the input; either may be missing."""

    name = "Elementwise"
    key_text = (
        "input, elementwise (1 where a parameter is only added): any small module of yours that computes `x * p`, "
        "`x + p` or `x * p + b`, with one number per element of one axis; a trial finds out"
    )

    def __init__(self, width: int, axes: Mapping[int, int], *, factor: str | None, shift: str | None) -> None:
        """Describe a module.

        Args:
            width: the number of elements of each parameter.
            axes: for each number of axes that an input may have, the axis that the parameters lie along.
            factor: the name of the parameter that multiplies, or None.
            shift: the name of the parameter that is added, or None.
        """
        self.ranks = tuple(axes)
        self._width, self._axes = width, axes
        self._factor, self._shift = factor, shift

    def uses(self, module: nn.Module) -> tuple[ParameterUse, ...]:
        """The factor takes value ⊙ key, the shift takes the value."""
        named = (("factor", self._factor, "scale"), ("shift", self._shift, "bias"))
        return tuple(ParameterUse(use, parameter, how) for use, parameter, how in named if parameter is not None)

    def widths(self, module: nn.Module) -> tuple[int, int]:
        """Return the number of elements, twice; without a factor the key has width 1."""
        return (1 if self._factor is None else self._width), self._width

    def keys(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """Return the input with the parameters' axis last; without a factor 1 for each pattern."""
        rows = inputs.movedim(self._axes[inputs.dim()], -1)
        return torch.ones_like(rows[..., :1]) if self._factor is None else rows

    def values(self, module: nn.Module, inputs: Tensor, error: Tensor) -> Tensor:
        """Return the error with the parameters' axis last."""
        return error.movedim(self._axes[inputs.dim()], -1)


class PositionTable(TriedKind):
    """z = x + table[position], with positions on the last axis but one of the input."""

    name = "PositionTable"
    key_text = (
        "position, an integer: any small module of yours that adds a table (..., positions, width) to its input; a "
        "trial finds out"
    )

    def __init__(self, table: str, width: int, ranks: tuple[int, ...]) -> None:
        """Describe a module.

        Args:
            table: the name of the parameter, (..., positions, width) with axes of length 1 in front.
            width: the length of the table's last axis.
            ranks: the numbers of axes that an input may have.
        """
        self.ranks = ranks
        self._table, self._width = table, width

    def uses(self, module: nn.Module) -> tuple[ParameterUse, ...]:
        """The table takes values by row."""
        return (ParameterUse("table", self._table, "rows"),)

    def widths(self, module: nn.Module) -> tuple[int, int]:
        """Return (1, the width of a row)."""
        return 1, self._width

    def keys(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """Return the position of each pattern, (..., positions, 1)."""
        positions = torch.arange(inputs.shape[-2], device=inputs.device)
        return positions.expand(inputs.shape[:-1])[..., None]


@recognises(Elementwise, PositionTable)
def find_elementwise(module: nn.Module) -> LayerKind | None:
    """Return the kind of a module that only multiplies by a parameter or adds one, element by element; or None."""
    parameters = tried_parameters(module)
    if parameters is None:
        return None
    shapes = {tuple(size for size in parameter.shape if size != 1) for parameter in parameters.values()}
    if len(shapes) != 1:
        return None
    with untouched_generators():
        return _tried(module, parameters, *shapes)


def _tried(module: nn.Module, parameters: Mapping[str, Tensor], shape: tuple[int, ...]) -> LayerKind | None:
    """Try what a copy of a module computes, whose parameters all have one shape but for axes of length 1."""
    try:
        trial = ModuleTrial(module)
    except Exception:  # a module that cannot be copied is not recognised
        return None
    if len(shape) == 1:
        return _find_along_an_axis(trial, list(parameters), shape[0])
    (name, parameter), *others = parameters.items()
    if not others and len(shape) == 2 and tuple(parameter.shape[-2:]) == shape:
        return _find_table(trial, name, *shape)
    return None


def _find_along_an_axis(trial: ModuleTrial, names: Sequence[str], width: int) -> Elementwise | None:
    """Return the kind of a module whose parameters all have `width` elements along one axis, if it is `Elementwise`."""
    other = 3 if width == 2 else 2  # the length of every other axis
    ways: Sequence[tuple[str | None, str | None]]
    ways = [(names[0], names[1]), (names[1], names[0])] if len(names) == 2 else [(names[0], None), (None, names[0])]
    for factor, shift in ways:

        def expected(inputs: Tensor, factor: str | None = factor, shift: str | None = shift) -> Tensor:
            axis = inputs.shape.index(width)
            along = [-1 if i == axis else 1 for i in range(inputs.dim())]
            scaled = inputs if factor is None else inputs * trial.parameters[factor].reshape(along)
            return scaled if shift is None else scaled + trial.parameters[shift].reshape(along)

        axes = {
            rank: axis
            for rank in RANKS
            for axis in range(rank)
            if trial.computes(expected, [*[other] * axis, width, *[other] * (rank - 1 - axis)])
        }
        if axes:
            return Elementwise(width, axes, factor=factor, shift=shift)
    return None


def _find_table(trial: ModuleTrial, name: str, positions: int, width: int) -> PositionTable | None:
    """Return the kind of a module with one parameter (..., positions, width), if it is a `PositionTable`.

    The module must take inputs of all positions. It may refuse shorter ones, but not compute anything else for them.
    """

    def expected(inputs: Tensor) -> Tensor:
        return inputs + trial.parameters[name].reshape(positions, width)[: inputs.shape[-2]]

    shapes = {2: [positions, width], 3: [2, positions, width], 4: [2, 1, positions, width]}
    ranks = [rank for rank, shape in shapes.items() if trial.computes(expected, shape)]
    for length in {max(1, positions // 2), positions - 1}:
        shape = [*shapes[3 if 3 in ranks else 2][:-2], length, width]
        if ranks and trial.accepts(shape) and not trial.computes(expected, shape):
            return None
    return PositionTable(name, width, tuple(ranks)) if ranks else None
