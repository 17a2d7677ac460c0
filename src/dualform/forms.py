"""Forms: how a parameter is made of patterns, and what it does to a query. Pure, one small class per form.

Every parameter that dualform records is a sum over patterns that is linear in their values,

    parameter = start + sum_t gradient(c_t · e_t, x_t)

and acts linearly on a query. Forms differ only in how a key meets a value: an outer product, a row of a table, an
elementwise product, or not at all. T patterns, Q queries. Coefficients stay outside: they scale values.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from dualform.errors import FormatError


class Form(ABC):
    """How one parameter of a layer meets its keys and values."""

    constant_key = False  # whether every key counts as 1

    @abstractmethod
    def gradient(self, values: Tensor, keys: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the sum over patterns of value and key joined, in the parameter's shape.

        Args:
            values: (T, d_out)
            keys: (T, d_in)
            shape: the parameter's.
        """

    def factors(self, keys: Tensor, columns: Tensor | None) -> Tensor | None:
        """Return F, (T, C), such that the gradient times some columns is Eᵀ F, `placed`; nothing where it is no such.

        Without columns the gradient itself is meant, of a parameter of one axis.
        """
        return None

    def placed(self, found: Tensor, rows: int) -> Tensor:
        """Return Eᵀ F, (d_out, C), in the rows of the parameter that it belongs to, (rows, C): here all."""
        return found

    def part(self, values: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return what of the values and keys this parameter meets: here all."""
        return values, keys

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

    def factors(self, keys: Tensor, columns: Tensor | None) -> Tensor | None:
        """Return X R."""
        return None if columns is None else keys @ columns

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

    constant_key = True

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

    constant_key = True

    def factors(self, keys: Tensor, columns: Tensor | None) -> Tensor | None:
        """Return 1."""
        return keys.new_ones(len(keys), 1) if columns is None else None

    def gradient(self, values: Tensor, keys: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the sum of values."""
        return values.sum(dim=0).reshape(*shape)

    def respond(self, parameter: Tensor, queries: Tensor) -> Tensor:
        """Return b."""
        return parameter.reshape(1, -1).expand(len(queries), -1)

    def meet(self, queries: Tensor, keys: Tensor, units: Tensor, matrix: Tensor) -> Tensor:
        """Return A[o]."""
        return matrix.reshape(-1)[units][:, None].expand(-1, len(keys))


class Part(Form):
    """A form whose parameter meets only a part of each key or value, or is met only in some of its rows.

    Recurrent layers join input and hidden state to one key, of which each weight meets its columns; attention packs
    three projections into the rows of one weight.
    """

    def __init__(
        self,
        whole: Form,
        *,
        keys: slice | None = None,
        values: Sequence[slice] = (),
        width: int = 0,
        rows: slice | None = None,
    ) -> None:
        self.whole = whole
        self.constant_key = whole.constant_key
        self._keys = keys
        self._columns = torch.cat([torch.arange(s.start, s.stop) for s in values]) if values else None
        self._width = width  # of a whole value
        self._rows = rows

    def part(self, values: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the parameter's columns of values and keys."""
        return self._of_value(values), self._of_key(keys)

    def gradient(self, values: Tensor, keys: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the part's gradient in the parameter's shape, zero in rows that are not met."""
        values, keys = self.part(values, keys)
        if self._rows is None:
            return self.whole.gradient(values, keys, shape)
        whole = values.new_zeros(*shape)
        met = whole[self._rows]
        met.copy_(self.whole.gradient(values, keys, met.shape))
        return whole

    def factors(self, keys: Tensor, columns: Tensor | None) -> Tensor | None:
        """Return what the form gives for its part of the keys."""
        return self.whole.factors(self._of_key(keys), columns)

    def placed(self, found: Tensor, rows: int) -> Tensor:
        """Return the part's values, zero in rows that are not met."""
        met = found if self._columns is None else found[self._columns.to(found.device)]
        if self._rows is None:
            return met
        whole = found.new_zeros(rows, found.shape[1])
        whole[self._rows] = met
        return whole

    def respond(self, parameter: Tensor, queries: Tensor) -> Tensor:
        """Return the part's response, zero in outputs that it does not reach."""
        found = self.whole.respond(self._of_rows(parameter), self._of_key(queries))
        if self._columns is None:
            return found
        whole = found.new_zeros(len(found), self._width)
        whole[:, self._columns.to(found.device)] = found
        return whole

    def meet(self, queries: Tensor, keys: Tensor, units: Tensor, matrix: Tensor) -> Tensor:
        """Return what the part's form does, zero for units that it does not reach."""
        queries, keys, matrix = self._of_key(queries), self._of_key(keys), self._of_rows(matrix)
        if self._columns is None:
            return self.whole.meet(queries, keys, units, matrix)
        row_of = torch.full((self._width,), -1, device=units.device)
        columns = self._columns.to(units.device)
        row_of[columns] = torch.arange(len(columns), device=units.device)
        rows = row_of[units]
        return self.whole.meet(queries, keys, rows.clamp(min=0), matrix) * (rows >= 0)[:, None]

    def _of_key(self, keys: Tensor) -> Tensor:
        return keys if self._keys is None else keys[:, self._keys]

    def _of_value(self, values: Tensor) -> Tensor:
        return values if self._columns is None else values[:, self._columns.to(values.device)]

    def _of_rows(self, parameter: Tensor) -> Tensor:
        return parameter if self._rows is None else parameter[self._rows]


FORMS: dict[str, Form] = {
    "weight": Outer(),
    "transposed": Transposed(),
    "grouped": Grouped(),
    "rows": Rows(),
    "scale": Scale(),
    "bias": Constant(),
}
"""Every whole form by name."""


@cache
def form(role: str) -> Form:
    """Return the form that a role names: one of `FORMS`, and in brackets what part of it, if not all.

    `weight(keys=0:64)` meets the first 64 elements of a key; `weight(values=0:8+12:16/16)` those elements of a value
    that is 16 wide; `weight(rows=0:64)` is met in its first 64 rows only. Several are separated by semicolons.

    >>> form("weight(keys=0:1)").gradient(torch.ones(1, 2), torch.tensor([[3.0, 4.0]]), (2, 1))
    tensor([[3.],
            [3.]])
    """
    match = re.fullmatch(r"(\w+)(?:\((.*)\))?", role)
    if match is None or match[1] not in FORMS:
        raise FormatError(f"{role!r} is no role of a parameter; known are {', '.join(FORMS)}. Use a newer dualform.")
    whole = FORMS[match[1]]
    if match[2] is None:
        return whole
    parts = dict(item.split("=") for item in match[2].split(";"))
    values, _, width = parts.get("values", "").partition("/")
    return Part(
        whole,
        keys=_range(parts["keys"]) if "keys" in parts else None,
        values=[_range(text) for text in values.split("+")] if values else (),
        width=int(width or 0),
        rows=_range(parts["rows"]) if "rows" in parts else None,
    )


def _range(text: str) -> slice:
    start, stop = text.split(":")
    return slice(int(start), int(stop))
