"""Parameter maps: how a parameter's gradient is made of keys and values, and how the parameter acts on a query.

Every parameter that dualform records is a sum over patterns that is linear in their values,

    parameter = start + sum_t gradient(c_t · e_t, x_t)

and acts linearly on a query. A parameter map says how a key x_t and a value e_t make a gradient: by an outer product,
by adding the value to a row of a table, by an elementwise product, or from the value alone. There is one small class
per map. Shapes: T patterns, Q queries, keys (T, d_in), values (T, d_out). Coefficients stay outside, since they only
scale values. Nothing here knows layers, files or optimizers; `parameter_use.py` says which map a layer uses for a
parameter.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor


class ParameterMap(ABC):
    """How one parameter of a layer is made of the layer's keys and values.

    Attributes:
        multiplies_keys: whether the gradient is a product with the elements of the keys, so that it grows with them.
        takes_ids: whether a key is not a vector but the number of a row of the parameter.
        is_bias: whether the gradient is the sum of the values alone.
        is_affine: whether the parameter is W or b of z = W x + b and takes every element of a value.
        is_plain_matrix: whether the parameter is all of W in z = W x, stored as (d_out, d_in).
        is_plain_bias: whether the parameter is all of b in z = b.
    """

    multiplies_keys: bool = True
    takes_ids: bool = False
    is_bias: bool = False
    is_affine: bool = False
    is_plain_matrix: bool = False
    is_plain_bias: bool = False

    @abstractmethod
    def gradient(self, values: Tensor, keys: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the gradient that patterns give the parameter together, in the parameter's shape.

        Args:
            values: (T, d_out)
            keys: (T, d_in)
            shape: the parameter's shape.
        """

    def projection_factors(self, keys: Tensor, columns: Tensor | None) -> Tensor | None:
        """Return the factor F (T, C) with gradient @ columns = Eᵀ F, or None if the gradient has no such form.

        The product Eᵀ F still has to be put into the parameter's rows by `place_projection`.

        Args:
            keys: (T, d_in)
            columns: (d_in, C), or None for the gradient itself of a parameter that has one axis; C is 1 then.
        """
        return None

    def place_projection(self, product: Tensor, rows: int) -> Tensor:
        """Return the product Eᵀ F (d_out, C) in the parameter's rows, (rows, C): here they are the value's elements."""
        return product

    @abstractmethod
    def apply(self, parameter: Tensor, queries: Tensor) -> Tensor:
        """Return what a parameter, or a share of it, adds to the layer's output for each query, (Q, d_out)."""

    @abstractmethod
    def unit_factors(self, queries: Tensor, keys: Tensor, units: Tensor, matrix: Tensor) -> Tensor:
        """Return the number that multiplies each pattern's value at one output unit of each query, (Q, T).

        Args:
            queries: (Q, d_in)
            keys: (T, d_in)
            units: (Q,) the output unit of each query.
            matrix: the numbers by which the optimizer multiplied the gradient, element by element, in the parameter's
                shape.
        """

    def unit_contributions(
        self, queries: Tensor, keys: Tensor, values: Tensor, units: Tensor, side: Tensor, shape: Sequence[int]
    ) -> Tensor:
        """Return what each pattern adds to one unit of each query, its gradient multiplied from one side, (Q, T).

        The output o of a query q is `⟨parameter, D⟩` with D the gradient of value 1 at o and key q. So a pattern whose
        gradient G became K G adds `⟨K G, D⟩ = ⟨G, Kᵀ D⟩`: its value times what the parameter Kᵀ D gives for its key.

        Args:
            queries: (Q, d_in)
            keys: (T, d_in)
            values: (T, d_out)
            units: (Q,) the output unit of each query.
            side: a symmetric K, (rows, rows), from the left; or (cols, cols), from the right where rows > cols.
            shape: the parameter's shape, (rows, cols).
        """
        found = []
        for query, unit in zip(queries, units.tolist(), strict=True):
            one = values.new_zeros(1, values.shape[1])
            one[0, unit] = 1
            unit_gradient = self.gradient(one, query[None], shape)  # D
            moved = unit_gradient @ side if shape[0] > shape[1] else side @ unit_gradient
            found.append((self.apply(moved, keys) * values).sum(dim=1))
        return torch.stack(found) if found else values.new_zeros(0, len(values))

    def asked_elements(self, queries: Tensor, units: Tensor, shape: Sequence[int]) -> Tensor:
        """Return which elements of a matrix in the parameter's shape `unit_factors` reads, as a mask of that shape.

        Args:
            queries: (Q, d_in)
            units: (Q,) the output unit of each query.
            shape: the parameter's shape.
        """
        # Where all else is 1, every element that is read has a positive derivative.
        with torch.inference_mode(False), torch.enable_grad():
            matrix = torch.ones(*shape, dtype=torch.float64, device="cpu", requires_grad=True)
            rows = queries.detach().cpu().clone()
            asked = rows if self.takes_ids else torch.ones_like(rows, dtype=torch.float64)
            keys = asked if self.takes_ids else asked[:1]
            read = self.unit_factors(asked, keys, units.cpu().clone(), matrix)
            (slope,) = torch.autograd.grad(read.sum(), matrix)
        return slope != 0

    def rank_one(self, queries: Tensor, units: Tensor, d_out: int, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return vectors l (Q, rows) and r (Q, cols) such that the output of each query is ⟨parameter, l rᵀ⟩.

        Args:
            queries: (Q, d_in), in the CPU's memory.
            units: (Q,) the output unit of each query.
            d_out: the number of output units.
            shape: the parameter's shape, (rows, cols).
        """
        left, right = (torch.zeros(len(queries), size, dtype=torch.float64, device="cpu") for size in shape)
        for i, unit in enumerate(units.tolist()):
            one = torch.zeros(1, d_out, dtype=torch.float64, device="cpu")
            one[0, unit] = 1
            query = queries[i : i + 1] if self.takes_ids else queries[i : i + 1].double()
            matrix = self.gradient(one, query, shape)
            row = matrix[int(matrix.abs().amax(dim=1).argmax())]
            column = int(row.abs().argmax())
            if float(row[column]):
                left[i], right[i] = matrix[:, column] / row[column], row
        return left, right

    def rank_one_contributions(self, left: Tensor, right: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return ⟨G, l rᵀ⟩ for each pattern's gradient G, (Q, T); see `rank_one`.

        Args:
            left: (Q, rows)
            right: (Q, cols)
            keys: (T, d_in)
            values: (T, d_out)
        """
        found = [
            (self.apply(row[:, None] * column, keys) * values).sum(dim=1)
            for row, column in zip(left, right, strict=True)
        ]
        return torch.stack(found) if found else values.new_zeros(0, len(values))


class OuterMap(ParameterMap):
    """A matrix (d_out, d_in): value ⊗ key. Linear layers, and convolutions over unfolded patches."""

    is_affine = True
    is_plain_matrix = True

    def gradient(self, values: Tensor, keys: Tensor, shape: Sequence[int]) -> Tensor:
        """Return Eᵀ X."""
        return (values.t() @ keys).reshape(*shape)

    def projection_factors(self, keys: Tensor, columns: Tensor | None) -> Tensor | None:
        """Return X R."""
        return None if columns is None else keys @ columns

    def apply(self, parameter: Tensor, queries: Tensor) -> Tensor:
        """Return W q."""
        return queries @ parameter.flatten(1).T

    def unit_factors(self, queries: Tensor, keys: Tensor, units: Tensor, matrix: Tensor) -> Tensor:
        """Return x · (A[o] ⊙ q)."""
        return (queries * matrix.flatten(1)[units]) @ keys.T

    def unit_contributions(
        self, queries: Tensor, keys: Tensor, values: Tensor, units: Tensor, side: Tensor, shape: Sequence[int]
    ) -> Tensor:
        """Return (K e)_o (x · q), or e_o (x · K q) for a tall matrix."""
        if shape[0] > shape[1]:
            return ((queries @ side) @ keys.T) * values[:, units].T
        return (queries @ keys.T) * (side[units] @ values.T)

    def rank_one_contributions(self, left: Tensor, right: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return (l · e) (r · x)."""
        return (left @ values.T) * (right @ keys.T)


class TransposedMap(ParameterMap):
    """A matrix stored the other way round, (d_in, d_out): key ⊗ value."""

    is_affine = True

    def gradient(self, values: Tensor, keys: Tensor, shape: Sequence[int]) -> Tensor:
        """Return Xᵀ E."""
        return keys.t() @ values

    def apply(self, parameter: Tensor, queries: Tensor) -> Tensor:
        """Return q W."""
        return queries @ parameter

    def unit_factors(self, queries: Tensor, keys: Tensor, units: Tensor, matrix: Tensor) -> Tensor:
        """Return x · (A[:, o] ⊙ q)."""
        return (queries * matrix.T[units]) @ keys.T

    def unit_contributions(
        self, queries: Tensor, keys: Tensor, values: Tensor, units: Tensor, side: Tensor, shape: Sequence[int]
    ) -> Tensor:
        """Return (K e)_o (x · q) for a tall matrix, or e_o (x · K q)."""
        if shape[0] > shape[1]:
            return (queries @ keys.T) * (side[units] @ values.T)
        return ((queries @ side) @ keys.T) * values[:, units].T

    def rank_one_contributions(self, left: Tensor, right: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return (l · x) (r · e)."""
        return (left @ keys.T) * (right @ values.T)


class GroupedMap(ParameterMap):
    """A convolution in groups: keys are the groups' patches side by side, each joined with its group's values only."""

    def gradient(self, values: Tensor, keys: Tensor, shape: Sequence[int]) -> Tensor:
        """Return E_gᵀ X_g for every group g, one under the other."""
        groups = keys.shape[1] // (torch.Size(shape).numel() // shape[0])
        parts = [e.t() @ x for e, x in zip(values.chunk(groups, 1), keys.chunk(groups, 1), strict=True)]
        return torch.cat(parts).reshape(*shape)

    def apply(self, parameter: Tensor, queries: Tensor) -> Tensor:
        """Return W_g q_g for every group g."""
        kernels = parameter.flatten(1)
        groups = queries.shape[1] // kernels.shape[1]
        parts = zip(queries.chunk(groups, 1), kernels.chunk(groups, 0), strict=True)
        return torch.cat([rows @ kernel.T for rows, kernel in parts], dim=1)

    def unit_factors(self, queries: Tensor, keys: Tensor, units: Tensor, matrix: Tensor) -> Tensor:
        """Return x_g · (A[o] ⊙ q_g) with the unit's own group g."""
        kernels = matrix.flatten(1)
        width = kernels.shape[1]
        groups = queries.shape[1] // width
        group = units // (len(kernels) // groups)  # (Q,)
        wide = torch.zeros_like(queries).reshape(len(queries), groups, width)
        rows = torch.arange(len(queries), device=queries.device)
        wide[rows, group] = queries.reshape(len(queries), groups, width)[rows, group] * kernels[units]
        return wide.flatten(1) @ keys.T


class TransposedKernelMap(ParameterMap):
    """The kernel of a transposed convolution, (channels, d_out / groups, *kernel): key ⊗ value, group by group.

    A key is a patch, (channels × kernel) with the channel as the slower axis, so d_in = channels · prod(kernel). In G
    groups the g-th part of the channels is joined with the g-th part of the values only.
    """

    def __init__(self, groups: int = 1) -> None:
        self.is_affine = groups == 1
        self._groups = groups

    def gradient(self, values: Tensor, keys: Tensor, shape: Sequence[int]) -> Tensor:
        """Return X_gᵀ E_g for every group g, with the axis of the values moved behind that of the channels."""
        parts = zip(keys.chunk(self._groups, 1), values.chunk(self._groups, 1), strict=True)
        joined = torch.cat([x.t() @ e for x, e in parts])  # (channels × kernel, d_out / groups)
        return joined.reshape(shape[0], -1, shape[1]).transpose(1, 2).reshape(*shape)

    def apply(self, parameter: Tensor, queries: Tensor) -> Tensor:
        """Return W_g q_g for every group g."""
        parts = zip(queries.chunk(self._groups, 1), parameter.chunk(self._groups), strict=True)
        return torch.cat([rows @ kernel.transpose(0, 1).flatten(1).T for rows, kernel in parts], dim=1)

    def unit_factors(self, queries: Tensor, keys: Tensor, units: Tensor, matrix: Tensor) -> Tensor:
        """Return x_g · (A[:, o] ⊙ q_g) with the unit's own group g."""
        each = matrix.shape[1]  # units of a group
        kernels = torch.stack([part.transpose(0, 1).flatten(1) for part in matrix.chunk(self._groups)])
        group = units // each  # (Q,)
        rows = torch.arange(len(queries), device=queries.device)
        parts = queries.reshape(len(queries), self._groups, -1)
        wide = torch.zeros_like(parts)
        wide[rows, group] = parts[rows, group] * kernels[group, units % each]
        return wide.flatten(1) @ keys.T


class RowsMap(ParameterMap):
    """A table (..., d_out) looked up by an integer key, (T, 1): the value is added to the key's row.

    Rows are counted over all axes but the last, so that a table of positions may have axes of length 1 in front.
    """

    multiplies_keys = False
    takes_ids = True

    def gradient(self, values: Tensor, keys: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the values summed by row."""
        rows = values.new_zeros(*shape).view(-1, shape[-1])
        return rows.index_add_(0, keys.reshape(-1), values).view(*shape)

    def apply(self, parameter: Tensor, queries: Tensor) -> Tensor:
        """Return the query's row."""
        return parameter.flatten(0, -2)[queries.reshape(-1)]

    def unit_factors(self, queries: Tensor, keys: Tensor, units: Tensor, matrix: Tensor) -> Tensor:
        """Return A[row, o] where the keys are equal."""
        return (queries.reshape(-1, 1) == keys.reshape(1, -1)) * matrix.flatten(0, -2)[queries.reshape(-1), units][
            :, None
        ]

    def unit_contributions(
        self, queries: Tensor, keys: Tensor, values: Tensor, units: Tensor, side: Tensor, shape: Sequence[int]
    ) -> Tensor:
        """Return (K e)_o where the keys are equal for a tall table, or K[row, row'] e_o."""
        if shape[0] > shape[1]:
            return (queries.reshape(-1, 1) == keys.reshape(1, -1)) * (side[units] @ values.T)
        return side[queries.reshape(-1)][:, keys.reshape(-1)] * values[:, units].T


class ScaleMap(ParameterMap):
    """An elementwise factor, the affine part of a normalisation: value ⊙ key."""

    def gradient(self, values: Tensor, keys: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the sum of e ⊙ x."""
        return (values * keys).sum(dim=0).reshape(*shape)

    def apply(self, parameter: Tensor, queries: Tensor) -> Tensor:
        """Return w ⊙ q."""
        return queries * parameter.reshape(-1)

    def unit_factors(self, queries: Tensor, keys: Tensor, units: Tensor, matrix: Tensor) -> Tensor:
        """Return A[o] q[o] x[o]."""
        mine = (matrix.reshape(-1)[units] * queries.gather(1, units[:, None])[:, 0])[:, None]
        return mine * keys[:, units].T


class BiasMap(ParameterMap):
    """A bias: its gradient is the sum of the values, as if every key were the constant 1."""

    multiplies_keys = False
    is_bias = True
    is_affine = True
    is_plain_bias = True

    def projection_factors(self, keys: Tensor, columns: Tensor | None) -> Tensor | None:
        """Return 1."""
        return keys.new_ones(len(keys), 1) if columns is None else None

    def gradient(self, values: Tensor, keys: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the sum of values."""
        return values.sum(dim=0).reshape(*shape)

    def apply(self, parameter: Tensor, queries: Tensor) -> Tensor:
        """Return b."""
        return parameter.reshape(1, -1).expand(len(queries), -1)

    def unit_factors(self, queries: Tensor, keys: Tensor, units: Tensor, matrix: Tensor) -> Tensor:
        """Return A[o]."""
        return matrix.reshape(-1)[units][:, None].expand(-1, len(keys))


PARAMETER_MAPS: dict[str, ParameterMap] = {
    "outer": OuterMap(),
    "transposed": TransposedMap(),
    "grouped": GroupedMap(),
    "transposed_kernel": TransposedKernelMap(),
    "rows": RowsMap(),
    "scale": ScaleMap(),
    "bias": BiasMap(),
}
"""Every parameter map of whole keys, values and parameters, by the name that a run's manifest has for it."""
