"""What a pattern is measured by, for each query: attention, magnitude, contribution."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from dualform.engine.block import Block
from dualform.identity.parameter_use import ParameterUse, matrix_and_bias
from dualform.identity.products import attend, scale

Of = Literal["attention", "magnitude", "contribution", "effect"]


class Measure(Protocol):
    """Measures the patterns of a block."""

    @property
    def needs_values(self) -> bool:
        """Whether values and coefficients have to be read."""

    def __call__(self, queries: Tensor, block: Block, out: Tensor | None = None) -> Tensor:
        """Return a row of measures per query or input, (Q, n), in the memory of `out` where that is of use."""


@dataclass(frozen=True, slots=True)
class PatternMeasure:
    """Attention, magnitude or contribution. Effects have a measure of their own, in `dualform.effects.layer_effects`.

    Attributes:
        of: attention x·q; magnitude |x·q|; or contribution, what the pattern adds to an output unit.
        units: (Q,) the output unit of each query, for contributions. Without units a contribution's measure is only the
            number that multiplies the pattern's value.
        shapes: of the layer's parameters, by use; for contributions.
    """

    of: Of
    units: Tensor | None = None
    shapes: Mapping[ParameterUse, Sequence[int]] = field(default_factory=dict)

    @property
    def needs_values(self) -> bool:
        """Whether values and coefficients have to be read."""
        return self.of == "contribution"

    def __call__(self, queries: Tensor, block: Block, out: Tensor | None = None) -> Tensor:
        """Return the measures, (Q, n), in the memory of `out` where that is of use."""
        if self.of == "contribution":
            return self._contribution(queries, block)
        attention = attend(queries, block.keys, out)
        if block.scales is not None:
            attention *= block.scales
        return attention if self.of == "attention" else attention.abs_()

    def _contribution(self, queries: Tensor, block: Block) -> Tensor:
        assert block.values is not None, "contributions need values"
        plain = matrix_and_bias(block.coefficients)
        if plain is not None:
            of_matrix, of_bias = (None if use is None else block.coefficients[use] for use in plain)
            of_matrix = torch.zeros_like(block.keys[:, 0]) if of_matrix is None else of_matrix
            scaled = scale(attend(queries, block.keys), of_matrix, of_bias)
            return scaled if self.units is None else scaled * block.values[:, self.units].T
        assert self.units is not None, "only a linear layer's values are multiplied by one number"
        total = torch.zeros(len(queries), len(block.keys), dtype=block.values.dtype, device=queries.device)
        for use, coefficients in block.coefficients.items():
            ones = torch.ones(self.shapes[use], dtype=block.values.dtype, device=queries.device)
            total += use.parameter_map.unit_factors(queries, block.keys, self.units, ones) * coefficients
        return total * block.values[:, self.units].T
