"""The model on the way: every input's quantity with any weights, and its gradient's product with changes of weights.

Inputs are gathered into *units*: an input that is asked about is a unit of its own, and all reference inputs of one
target are one unit, whose numbers are means. The product of a unit's gradient with a change of a matrix is either taken
forwards, δ · (ΔU h) for each row, or with the gradient that the unit's rows make together, whichever costs less.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dualform.effects.output_gradients import (
    BackwardPass,
    Quantity,
    inputs_of_queries,
    quantity_of_batch,
    run_backward,
)
from dualform.engine.description import LayerEntry
from dualform.engine.model_layers import find_watched, move
from dualform.errors import QueryError
from dualform.identity.parameter_use import ParameterUse
from dualform.modes import evaluation_copy
from dualform.recording.watch import plain_name

PRODUCT_ELEMENTS = 1 << 24
"""The most elements that one product of rows or units with changes makes at once."""

CHECKED_INPUTS = 32
"""The most inputs that are run alone to see that every layer's rows are those of the inputs."""

State = Mapping[str, Tensor]
"""Uncovered parameters and buffers, by name."""


@dataclass(frozen=True, slots=True, eq=False)
class UnitRows:
    """One call of a layer, run forward and backward: what the gradient of its units' quantities is made of.

    Attributes:
        layer: the layer's name.
        keys: (n, d_in) the layer's inputs.
        values: (n, d_out) the gradients at its outputs, times what the row's input counts for in its unit.
        units: (n,) the unit of each row.
    """

    layer: str
    keys: Tensor
    values: Tensor
    units: Tensor


class PathProbe:
    """A copy of a model that is given weights of the path, and asked for products with changes of weights."""

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        targets: Tensor | None,
        quantity: Quantity,
        layers: Mapping[str, LayerEntry],
        *,
        batch_axis: int,
        units: Tensor | None = None,
    ) -> None:
        """Prepare a copy of the model.

        Args:
            model: a model of the recorded structure, on the device to compute on; it stays as it is.
            batches: what it is called with, one after the other.
            targets: of all inputs together; the model's own answer, where None, must be made into targets before.
            quantity: the quantity.
            layers: all recorded layers.
            batch_axis: which leading axis of inputs and outputs counts the inputs.
            units: (M,) the unit of each input of all batches; by default each is its own.
        """
        self._model = evaluation_copy(model)
        self._parameters = {plain_name(name): p for name, p in self._model.named_parameters()}
        self._buffers = {plain_name(name): b for name, b in self._model.named_buffers()}
        self.device = next((p.device for p in self._parameters.values()), torch.device("cpu"))
        self._batches = [move(batch, self.device) for batch in batches]
        self._targets = None if targets is None else targets.to(self.device)
        self._quantity = quantity
        self._layers = layers
        self._axis = batch_axis
        self._watched = find_watched(self._model, layers)
        self._reach = [
            self._parameters[name]
            for entry in layers.values()
            for name in _smallest(entry, self._parameters)
            if name in self._parameters
        ]
        self.names = list(layers)
        self.evaluations = 0
        self._of = units
        self._shares: Tensor | None = None  # (M,) what an input counts for in its unit

    @torch.no_grad()
    def put(self, weights: Mapping[str, Tensor], state: State) -> None:
        """Give the model these weights and this uncovered state."""
        for name, tensor in (*weights.items(), *state.items()):
            found = self._parameters.get(name, self._buffers.get(name))
            if found is not None:
                found.copy_(tensor)

    def as_parameter(self, name: str, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor in the dtype that the model's parameter of this name has, on the CPU."""
        found = self._parameters.get(name)
        return tensor.to("cpu", tensor.dtype if found is None else found.dtype, copy=True)

    def check_rows(self) -> None:
        """Raise unless every layer's rows are those of the inputs, in their order, and inputs do not see each other.

        Some inputs of the first batch of several are run alone, where all rows are their own: their quantity has to be
        the same, and so has a random product of each layer's gradient.
        """
        batch, first = next(
            ((b, n) for b, n in zip(self._batches, self._firsts(), strict=True) if _count(b, self._axis) > 1), (None, 0)
        )
        if batch is None:
            return
        count = _count(batch, self._axis)
        whole, quantity = self._fingerprints(batch, first, count)
        for place in torch.linspace(0, count - 1, min(count, CHECKED_INPUTS)).round().long().unique().tolist():
            alone, own = self._fingerprints(_one(batch, place, count, self._axis), first + place, 1)
            rounding = 1e3 * torch.finfo(quantity.dtype).eps
            if abs(float(own[0] - quantity[place])) > rounding * (1 + float(quantity.abs().max())):
                raise QueryError(
                    f"The quantity of input {place} is {float(own[0]):.6g} alone and {float(quantity[place]):.6g} "
                    "beside the others: the inputs of a batch see each other, so their path contributions cannot be "
                    "told apart. Ask about one input at a time."
                )
            for name, (products, sizes) in whole.items():
                mine, size = alone[name]
                if abs(float(products[place] - mine[0])) > rounding * (float(sizes.max()) + float(size[0])):
                    raise QueryError(
                        f"The rows that layer {name!r} sees are not those of the inputs in their order (input {place} "
                        "alone gives another gradient than beside the others): their path contributions cannot be "
                        "told apart. Ask about one input at a time."
                    )

    def _firsts(self) -> list[int]:
        """Return the number of each batch's first input among all inputs."""
        counts = [_count(batch, self._axis) for batch in self._batches]
        return [sum(counts[:i]) for i in range(len(counts))]

    def _fingerprints(self, batch: Any, first: int, count: int) -> tuple[dict[str, tuple[Tensor, Tensor]], Tensor]:
        """Return of each layer a random product of every input's gradient and the size of its terms; and quantities."""
        backward = self._run_backward(batch, first)
        generator = torch.Generator().manual_seed(0)
        found = {}
        for name in self.names:
            total, size = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
            for call in backward.calls[name]:
                if call.reached:
                    keys = call.keys().detach().flatten(0, -2).double().cpu()
                    values = call.values(torch.zeros(0, device=self.device)).double().cpu()
                    of = inputs_of_queries(call, count, self._axis)
                    sides = [
                        torch.randn(rows.shape[1], generator=generator, dtype=torch.float64) for rows in (keys, values)
                    ]
                    each = (keys @ sides[0]) * (values @ sides[1])
                    total.index_add_(0, of, each)
                    size.index_add_(0, of, each.abs())
            found[name] = (total, size)
        return found, backward.quantity

    @torch.no_grad()
    def quantity(self) -> Tensor:
        """Return the quantity of every unit, (U,), float64 on the CPU."""
        found: list[Tensor] = []
        for batch in self._batches:
            taken = sum(map(len, found))
            each = quantity_of_batch(self._model, batch, self._targets, taken, self._quantity, self._axis)
            found.append(each.double())
        numbers = torch.cat(found)
        units, shares = self._units_of(len(numbers))
        return numbers.new_zeros(self.units).index_add_(0, units, numbers * shares).cpu()

    @property
    def units(self) -> int:
        """How many units there are; known once a quantity was found."""
        assert self._of is not None, "a quantity has to be found before"
        return int(self._of.max()) + 1 if len(self._of) else 0

    def _units_of(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the unit of each input, and what the input counts for in it, (M,) each."""
        if self._of is None:
            self._of = torch.arange(count)
        if self._shares is None:
            self._of = self._of.to(self.device)
            self._shares = 1.0 / torch.bincount(self._of)[self._of].double()
        return self._of, self._shares

    def products(self, changes: Mapping[str, Tensor]) -> Tensor:
        """Return ⟨gradient of the quantity, change⟩ of every unit through each layer, (U, K, L), float64 on the device.

        Args:
            changes: K changes of each parameter, (K, ...).
        """
        kinds = len(next(iter(changes.values())))
        columns = {name: column for column, name in enumerate(self.names)}
        total = torch.zeros(len(self.names), self.units, kinds, dtype=torch.float64, device=self.device)
        for batch in self.rows():
            for rows in batch:
                for use in self._layers[rows.layer].uses:
                    if use.parameter in changes:
                        add_products(total[columns[rows.layer]], use, changes[use.parameter], rows)
        return total.permute(1, 2, 0)

    def rows(self) -> Iterator[list[UnitRows]]:
        """Yield, for each batch, what makes the gradient of every unit's quantity: each layer's keys and errors."""
        self.evaluations += 1
        taken = 0
        for batch in self._batches:
            backward = self._run_backward(batch, taken)
            count = len(backward.quantity)
            units, shares = (each[taken : taken + count] for each in self._units_of(taken + count))
            taken += count
            found = []
            for name in self.names:
                for call in backward.calls[name]:
                    if call.reached:
                        of = inputs_of_queries(call, count, self._axis).to(self.device)
                        values = call.values(torch.zeros(0, device=self.device))
                        weighted = values * shares[of].to(values.dtype)[:, None]
                        found.append(UnitRows(name, call.keys().detach().flatten(0, -2), weighted, units[of]))
            yield found

    def _run_backward(self, batch: Any, first: int) -> BackwardPass:
        """Run a batch forward and backward, to no more parameters than are needed to come to every layer."""
        return run_backward(
            self._model, batch, self._targets, first, self._quantity, self._watched, self._axis, reach=self._reach
        )


def _count(batch: Any, axis: int) -> int:
    """Return how many inputs a batch has."""
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple) else (batch,)
    found = (part.shape[axis] for part in parts if isinstance(part, Tensor) and part.dim() > axis)
    return int(next(found, 0))


def _one(batch: Any, place: int, count: int, axis: int) -> Any:
    """Return a batch with one input of a batch; tensors that do not count the inputs stay as they are."""

    def cut(part: Any) -> Any:
        if isinstance(part, Tensor) and part.dim() > axis and part.shape[axis] == count:
            return part.narrow(axis, place, 1)
        return part

    if isinstance(batch, Mapping):
        return {name: cut(part) for name, part in batch.items()}
    return tuple(cut(part) for part in batch) if isinstance(batch, tuple) else cut(batch)


def _smallest(entry: LayerEntry, parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Return the parameters of a layer that a backward has to come to: those with one axis, or else all."""
    names = list(dict.fromkeys(use.parameter for use in entry.uses))
    small = [name for name in names if name in parameters and parameters[name].dim() == 1]
    return small or names


def add_products(total: Tensor, use: ParameterUse, changes: Tensor, rows: UnitRows) -> None:
    """Add ⟨gradient, change⟩ of one call's rows to those of their units, in place.

    Args:
        total: (U, K) float64.
        use: how the layer uses the parameter.
        changes: (K, ...) changes of the parameter.
        rows: the call's rows.
    """
    keys, values, units = rows.keys, rows.values, rows.units
    kinds = len(changes)
    parameter_map = use.parameter_map
    if parameter_map.is_plain_bias:
        sums = values.new_zeros(len(total), values.shape[1], dtype=torch.float64)
        sums.index_add_(0, units, values.double())
        total += sums @ changes.reshape(kinds, -1).T.double()
    elif not parameter_map.is_plain_matrix:
        for k in range(kinds):
            each = (parameter_map.apply(changes[k].to(values.dtype), keys) * values).sum(1)
            total[:, k].index_add_(0, units, each.double())
    else:
        matrices = changes.flatten(2).to(values.dtype)
        present, counts = units.unique(return_counts=True)
        per_unit = len(values) // max(1, len(present))
        if per_unit * kinds > per_unit + kinds and bool((counts == per_unit).all()):
            _by_unit(total, matrices, keys, values, units, present)
        else:
            _by_row(total, matrices, keys, values, units)


def _by_row(total: Tensor, matrices: Tensor, keys: Tensor, values: Tensor, units: Tensor) -> None:
    """Add δ · (ΔU h) of each row: one product of all rows with all changes."""
    kinds, d_out, d_in = matrices.shape
    stacked = matrices.reshape(kinds * d_out, d_in).T
    step = max(1, PRODUCT_ELEMENTS // (kinds * d_out))
    for first in range(0, len(keys), step):
        part = slice(first, first + step)
        moved = (keys[part] @ stacked).view(-1, kinds, d_out)
        each = torch.bmm(moved, values[part, :, None])[:, :, 0]
        total.index_add_(0, units[part], each.double())


def _by_unit(total: Tensor, matrices: Tensor, keys: Tensor, values: Tensor, units: Tensor, present: Tensor) -> None:
    """Add the product of each unit's gradient, which its rows make together, with every change."""
    order = units.argsort(stable=True)
    grouped_keys = keys[order].view(len(present), len(order) // len(present), -1)
    grouped_values = values[order].view(len(present), len(order) // len(present), -1)
    flat = matrices.flatten(1).T
    step = max(1, PRODUCT_ELEMENTS // len(flat))
    for first in range(0, len(present), step):
        part = slice(first, first + step)
        gradients = torch.bmm(grouped_values[part].transpose(1, 2), grouped_keys[part]).flatten(1)
        total.index_add_(0, present[part], (gradients @ flat).double())
