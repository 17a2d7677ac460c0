"""Forms: how a parameter is made of patterns, and what it does to a query. Pure, one small class per form.

Every parameter that dualform records is a sum over patterns that is linear in their values,

    parameter = start + sum_t gradient(c_t · e_t, x_t)

and acts linearly on a query. Forms differ only in how a key meets a value: an outer product, a row of a table, an
elementwise product, or not at all. T patterns, Q queries. Coefficients stay outside: they scale values.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor


class Form(ABC):
    """How one parameter of a layer meets its keys and values."""

    @abstractmethod
    def gradient(self, values: Tensor, keys: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the sum over patterns of value and key joined, in the parameter's shape.

        Args:
            values: (T, d_out)
            keys: (T, d_in)
            shape: the parameter's.
        """

    @abstractmethod
    def respond(self, parameter: Tensor, queries: Tensor) -> Tensor:
        """Return what a parameter (or a share of it) adds to the layer's output, (Q, d_out)."""

    @abstractmethod
    def meet(self, queries: Tensor, keys: Tensor, units: Tensor, matrix: Tensor) -> Tensor:
        """Return what multiplies each pattern's value at one output unit of each query, (Q, T).

        Args:
            queries: (Q, d_in)
            keys: (T, d_in)
            units: (Q,)
            matrix: what the optimizer multiplied the gradient with, element by element, in the parameter's shape.
        """

    def through(
        self, queries: Tensor, keys: Tensor, values: Tensor, units: Tensor, side: Tensor, shape: Sequence[int]
    ) -> Tensor:
        """Return what each pattern adds to one unit of each query, its gradient multiplied from one side, (Q, T).

        The output o of a query q is `⟨parameter, D⟩` with D the gradient of value 1 at o and key q. So a pattern whose
        gradient G became K G adds `⟨K G, D⟩ = ⟨G, Kᵀ D⟩`: its value times what the parameter Kᵀ D gives for its key.

        Args:
            queries: (Q, d_in)
            keys: (T, d_in)
            values: (T, d_out)
            units: (Q,)
            side: a symmetric K, (rows, rows), from the left; or (cols, cols), from the right where rows > cols.
            shape: the parameter's, (rows, cols).
        """
        found = []
        for query, unit in zip(queries, units.tolist(), strict=True):
            one = values.new_zeros(1, values.shape[1])
            one[0, unit] = 1
            asked = self.gradient(one, query[None], shape)  # D
            moved = asked @ side if shape[0] > shape[1] else side @ asked
            found.append((self.respond(moved, keys) * values).sum(dim=1))
        return torch.stack(found) if found else values.new_zeros(0, len(values))


class Outer(Form):
    """A matrix: value ⊗ key. Linear layers, and convolutions over unfolded patches."""

    def gradient(self, values: Tensor, keys: Tensor, shape: Sequence[int]) -> Tensor:
        """Return Eᵀ X."""
        return (values.t() @ keys).reshape(*shape)

    def respond(self, parameter: Tensor, queries: Tensor) -> Tensor:
        """Return W q."""
        return queries @ parameter.flatten(1).T

    def meet(self, queries: Tensor, keys: Tensor, units: Tensor, matrix: Tensor) -> Tensor:
        """Return x · (A[o] ⊙ q)."""
        return (queries * matrix.flatten(1)[units]) @ keys.T

    def through(
        self, queries: Tensor, keys: Tensor, values: Tensor, units: Tensor, side: Tensor, shape: Sequence[int]
    ) -> Tensor:
        """Return (K e)_o (x · q), or e_o (x · K q) for a tall matrix."""
        if shape[0] > shape[1]:
            return ((queries @ side) @ keys.T) * values[:, units].T
        return (queries @ keys.T) * (side[units] @ values.T)


class Transposed(Form):
    """A matrix stored the other way round, (d_in, d_out): key ⊗ value."""

    def gradient(self, values: Tensor, keys: Tensor, shape: Sequence[int]) -> Tensor:
        """Return Xᵀ E."""
        return keys.t() @ values

    def respond(self, parameter: Tensor, queries: Tensor) -> Tensor:
        """Return q W."""
        return queries @ parameter

    def meet(self, queries: Tensor, keys: Tensor, units: Tensor, matrix: Tensor) -> Tensor:
        """Return x · (A[:, o] ⊙ q)."""
        return (queries * matrix.T[units]) @ keys.T

    def through(
        self, queries: Tensor, keys: Tensor, values: Tensor, units: Tensor, side: Tensor, shape: Sequence[int]
    ) -> Tensor:
        """Return (K e)_o (x · q) for a tall matrix, or e_o (x · K q)."""
        if shape[0] > shape[1]:
            return (queries @ keys.T) * (side[units] @ values.T)
        return ((queries @ side) @ keys.T) * values[:, units].T


class Grouped(Form):
    """A convolution in groups: keys are the groups' patches side by side, and each meets its own values only."""

    def gradient(self, values: Tensor, keys: Tensor, shape: Sequence[int]) -> Tensor:
        """Return E_gᵀ X_g for every group g, one under the other."""
        groups = keys.shape[1] // (torch.Size(shape).numel() // shape[0])
        parts = [e.t() @ x for e, x in zip(values.chunk(groups, 1), keys.chunk(groups, 1), strict=True)]
        return torch.cat(parts).reshape(*shape)

    def respond(self, parameter: Tensor, queries: Tensor) -> Tensor:
        """Return W_g q_g for every group g."""
        kernels = parameter.flatten(1)
        groups = queries.shape[1] // kernels.shape[1]
        parts = zip(queries.chunk(groups, 1), kernels.chunk(groups, 0), strict=True)
        return torch.cat([rows @ kernel.T for rows, kernel in parts], dim=1)

    def meet(self, queries: Tensor, keys: Tensor, units: Tensor, matrix: Tensor) -> Tensor:
        """Return x_g · (A[o] ⊙ q_g) with the unit's own group g."""
        kernels = matrix.flatten(1)
        width = kernels.shape[1]
        groups = queries.shape[1] // width
        group = units // (len(kernels) // groups)  # (Q,)
        wide = torch.zeros_like(queries).reshape(len(queries), groups, width)
        rows = torch.arange(len(queries), device=queries.device)
        wide[rows, group] = queries.reshape(len(queries), groups, width)[rows, group] * kernels[units]
        return wide.flatten(1) @ keys.T


class Rows(Form):
    """A table looked up by an integer key: the value goes to the key's row."""

    def gradient(self, values: Tensor, keys: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the values summed by row."""
        return values.new_zeros(*shape).index_add_(0, keys.reshape(-1), values)

    def respond(self, parameter: Tensor, queries: Tensor) -> Tensor:
        """Return the query's row."""
        return parameter[queries.reshape(-1)]

    def meet(self, queries: Tensor, keys: Tensor, units: Tensor, matrix: Tensor) -> Tensor:
        """Return A[row, o] where the keys are equal."""
        return (queries.reshape(-1, 1) == keys.reshape(1, -1)) * matrix[queries.reshape(-1), units][:, None]

    def through(
        self, queries: Tensor, keys: Tensor, values: Tensor, units: Tensor, side: Tensor, shape: Sequence[int]
    ) -> Tensor:
        """Return (K e)_o where the keys are equal for a tall table, or K[row, row'] e_o."""
        if shape[0] > shape[1]:
            return (queries.reshape(-1, 1) == keys.reshape(1, -1)) * (side[units] @ values.T)
        return side[queries.reshape(-1)][:, keys.reshape(-1)] * values[:, units].T


class Scale(Form):
    """An elementwise factor, the affine part of a normalisation: value ⊙ key."""

    def gradient(self, values: Tensor, keys: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the sum of e ⊙ x."""
        return (values * keys).sum(dim=0).reshape(*shape)

    def respond(self, parameter: Tensor, queries: Tensor) -> Tensor:
        """Return w ⊙ q."""
        return queries * parameter.reshape(-1)

    def meet(self, queries: Tensor, keys: Tensor, units: Tensor, matrix: Tensor) -> Tensor:
        """Return A[o] q[o] x[o]."""
        mine = (matrix.reshape(-1)[units] * queries.gather(1, units[:, None])[:, 0])[:, None]
        return mine * keys[:, units].T


class Constant(Form):
    """A bias: the key is the constant 1."""

    def gradient(self, values: Tensor, keys: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the sum of values."""
        return values.sum(dim=0).reshape(*shape)

    def respond(self, parameter: Tensor, queries: Tensor) -> Tensor:
        """Return b."""
        return parameter.reshape(1, -1).expand(len(queries), -1)

    def meet(self, queries: Tensor, keys: Tensor, units: Tensor, matrix: Tensor) -> Tensor:
        """Return A[o]."""
        return matrix.reshape(-1)[units][:, None].expand(-1, len(keys))


FORMS: dict[str, Form] = {
    "weight": Outer(),
    "transposed": Transposed(),
    "grouped": Grouped(),
    "rows": Rows(),
    "scale": Scale(),
    "bias": Constant(),
}
"""Every form by the role that a layer's parameter has in it."""
