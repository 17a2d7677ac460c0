"""The parameter map of a parameter that takes only a part of each key or value, or of which only some rows are used."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dualform.identity.parameter_maps import ParameterMap


class SlicedMap(ParameterMap):
    """A parameter map between slices of the keys, the values and the parameter.

    Recurrent layers join input and hidden state to one key, of which each weight takes its columns; attention packs
    three projections into the rows of one weight.
    """

    def __init__(
        self,
        inner: ParameterMap,
        *,
        keys: slice | None = None,
        values: Sequence[slice] = (),
        value_width: int | None = None,
        rows: slice | None = None,
    ) -> None:
        """Restrict a map.

        Args:
            inner: the map between the slices.
            keys: the columns of a key that the parameter takes, or None for all.
            values: the elements of a value that the parameter takes, one slice after the other; empty for all.
            value_width: d_out, the width of a whole value; needed with `values`.
            rows: the rows of the parameter that are used, or None for all.
        """
        assert not values or value_width is not None, "slices of a value need the whole value's width"
        self.multiplies_keys = inner.multiplies_keys
        self.takes_ids = inner.takes_ids
        self.is_bias = inner.is_bias
        self.is_affine = inner.is_affine and not values
        self._inner = inner
        self._keys = keys
        self._elements = torch.cat([torch.arange(s.start, s.stop) for s in values]) if values else None
        self._value_width = value_width or 0
        self._rows = rows

    def gradient(self, values: Tensor, keys: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the gradient between the slices in the parameter's shape, zero in rows that are not used."""
        values, keys = self._of_values(values), self._of_keys(keys)
        if self._rows is None:
            return self._inner.gradient(values, keys, shape)
        whole = values.new_zeros(*shape)
        used = whole[self._rows]
        used.copy_(self._inner.gradient(values, keys, used.shape))
        return whole

    def projection_factors(self, keys: Tensor, columns: Tensor | None) -> Tensor | None:
        """Return the inner map's factor for the parameter's columns of the keys."""
        return self._inner.projection_factors(self._of_keys(keys), columns)

    def place_projection(self, product: Tensor, rows: int) -> Tensor:
        """Return the parameter's elements of the product, zero in rows that are not used."""
        mine = product if self._elements is None else product[self._elements.to(product.device)]
        if self._rows is None:
            return mine
        whole = product.new_zeros(rows, product.shape[1])
        whole[self._rows] = mine
        return whole

    def apply(self, parameter: Tensor, queries: Tensor) -> Tensor:
        """Return the used rows' part of the output, zero in output units that they do not reach."""
        found = self._inner.apply(self._of_rows(parameter), self._of_keys(queries))
        if self._elements is None:
            return found
        whole = found.new_zeros(len(found), self._value_width)
        whole[:, self._elements.to(found.device)] = found
        return whole

    def unit_factors(self, queries: Tensor, keys: Tensor, units: Tensor, matrix: Tensor) -> Tensor:
        """Return the inner map's factors, zero for output units that the parameter does not reach."""
        queries, keys, matrix = self._of_keys(queries), self._of_keys(keys), self._of_rows(matrix)
        if self._elements is None:
            return self._inner.unit_factors(queries, keys, units, matrix)
        row_of = torch.full((self._value_width,), -1, device=units.device)
        elements = self._elements.to(units.device)
        row_of[elements] = torch.arange(len(elements), device=units.device)
        rows = row_of[units]
        return self._inner.unit_factors(queries, keys, rows.clamp(min=0), matrix) * (rows >= 0)[:, None]

    def _of_keys(self, keys: Tensor) -> Tensor:
        return keys if self._keys is None else keys[:, self._keys]

    def _of_values(self, values: Tensor) -> Tensor:
        return values if self._elements is None else values[:, self._elements.to(values.device)]

    def _of_rows(self, parameter: Tensor) -> Tensor:
        return parameter if self._rows is None else parameter[self._rows]
