"""The question for unrolled effects: the exact derivative of this very training's end, summed by sample or group."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from dualform.attend.answers import Effects
from dualform.attend.groups import Table
from dualform.attend.path import SAMPLE, Asked
from dualform.binning import Bins, By, bin_edges, grouping_columns, label_order
from dualform.effects.cautions import step_cautions
from dualform.effects.output_gradients import quantity_of_batch
from dualform.effects.unrolled import Adjoint, pull_back
from dualform.engine.model_layers import move
from dualform.engine.walk_back import RetracedStep
from dualform.errors import QueryError, SelectionError
from dualform.modes import evaluation_copy
from dualform.recording.watch import plain_name
from dualform.torch_modes import with_gradients

ADJOINT_BYTES = 1 << 30
"""Size of the derivatives of all inputs' quantities that are walked back together; more inputs walk once more."""

SAME = 1e-4
"""How far a parameter of the model may be from the trained one, relative to its norm."""

STEP = "step"
"""The column that every batch has: the number of its step."""


def find_unrolled_effects(table: Table, asked: Asked, by: By | None) -> Effects:
    """Find the derivative of a quantity of each input by the weight of each sample, or of each group, in the training.

    Args:
        table: the view that is asked: the whole training up to its horizon.
        asked: the trained model, the inputs and the quantity.
        by: columns of the batches; by default "sample".
    """
    if table.conditions:
        raise SelectionError(
            "Unrolled effects are those of the training that took place; a mask leaves patterns out of the sum of this "
            "one. Ask the whole memory, and look at the groups that the mask leaves out."
        )
    if not table.horizon:
        raise QueryError("No step was taken before step 0: nothing has effects.")
    parts = grouping_columns(SAMPLE if by is None else by)
    batches = list(asked.batches)
    axis = table.run.description.batch_axis
    count = _count_inputs(asked, axis)
    totals: dict[Any, Tensor] = {}
    error = 0.0
    sizes: dict[int, float] = {}
    together = count
    first = 0
    while first < count:
        walk = _Walk(asked, batches, parts, axis, first, together)
        table.run.walk_back(walk.visit, steps=table.horizon)
        for label, sums in walk.totals.items():
            totals.setdefault(label, torch.zeros(count, dtype=torch.float64))[walk.inputs] = sums
        for number, size in walk.sizes.items():
            sizes[number] = sizes.get(number, 0.0) + size
        error = max(error, walk.error)
        first, together = walk.inputs.stop, walk.together
    labels = tuple(sorted(totals, key=label_order))
    return Effects(
        layers=tuple(table.run.layers),
        quantity=getattr(asked.quantity, "__name__", "quantity") if callable(asked.quantity) else asked.quantity,
        by=tuple(map(str, parts)),
        groups=labels,
        values=torch.stack([totals[label] for label in labels], dim=1),
        outside={},
        method="unrolled",
        error=error,
        cautions=tuple(step_cautions(sizes)),
    )


class _Walk:
    """One walk back through the training, with the derivatives of some inputs' quantities.

    Attributes:
        inputs: the inputs of this walk.
        together: how many inputs a walk can take.
        totals: label -> the sum of the derivatives of these inputs by the weights of its rows, float64.
        sizes: step -> the sum of the absolute derivatives by the weights of its rows.
    """

    def __init__(
        self,
        asked: Asked,
        batches: Sequence[Any],
        parts: Sequence[str | Bins],
        batch_axis: int,
        first: int,
        together: int,
    ) -> None:
        self.inputs = slice(first, first + together)
        self.together = together
        self.totals: dict[Any, Tensor] = {}
        self.sizes: dict[int, float] = {}
        self._asked = asked
        self._batches = batches
        self._parts = parts
        self._axis = batch_axis
        self._adjoint: Adjoint | None = None

    @property
    def error(self) -> float:
        """How far the steps were at most from those that were differentiated, relative."""
        assert self._adjoint is not None, "a walk has at least one step"
        return max(self._adjoint.gradient_error, self._adjoint.step_error)

    def visit(self, step: RetracedStep) -> None:
        """Go back over one step."""
        if self._adjoint is None:
            self._adjoint = self._begin(step)
        found = self._adjoint.step_back(step).double().cpu()
        if not bool(torch.isfinite(found).all()):
            raise QueryError(
                f"The derivative by the weights of step {step.number} is not finite: small changes of this training "
                "grow without bound on the way to its end. Ask effects() without method."
            )
        self.sizes[step.number] = float(found.abs().sum())
        for row, label in enumerate(_labels(step, self._parts, found.shape[1])):
            self.totals[label] = self.totals.get(label, 0.0) + found[:, row]

    def _begin(self, step: RetracedStep) -> Adjoint:
        """Return the gradients of the quantities at the end of the training, by the parameters that were trained."""
        model = evaluation_copy(self._asked.model)
        mine = {plain_name(name): parameter for name, parameter in model.named_parameters()}
        trained: dict[int, Tensor] = {}
        for place, (name, after) in enumerate(zip(step.names, step.after, strict=True)):
            found = mine.get(name)
            if found is None:
                continue  # nothing of the quantity goes through it; the adjoint begins at zero
            if not _is_same(found.detach(), after):
                raise QueryError(
                    f"{name!r} of the model is not what it is after step {step.number}. Unrolled effects are those on "
                    "the trained model itself: give the model that the training returned."
                )
            trained[place] = found
        if not trained:
            raise QueryError(f"The model has none of the trained parameters: {', '.join(step.names)}.")
        kept = sum(
            2 * one.nbytes + _state_bytes(state) for one, state in zip(step.after, step.states_after, strict=True)
        )
        self.together = max(1, min(self.together, ADJOINT_BYTES // max(kept, 1)))
        self.inputs = slice(self.inputs.start, self.inputs.start + self.together)
        gradients = self._end_gradients(model, list(trained.values()))
        rows = dict(zip(trained, gradients, strict=True))
        many = len(next(iter(rows.values())))
        self.inputs = slice(self.inputs.start, self.inputs.start + many)
        return Adjoint.at_end(
            [
                rows[place].to(after.device) if place in rows else after.new_zeros(many, *after.shape)
                for place, after in enumerate(step.after)
            ]
        )

    @with_gradients
    def _end_gradients(self, model: torch.nn.Module, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradient of each input's quantity by each parameter, (M, ...)."""
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for trained in parameters:
            trained.requires_grad_()
        asked, taken = self._asked, 0
        rows: list[list[Tensor]] = [[] for _ in parameters]
        device = parameters[0].device
        for batch in self._batches:
            found = quantity_of_batch(model, move(batch, device), asked.targets, taken, asked.quantity, self._axis)
            wanted = range(max(self.inputs.start - taken, 0), min(self.inputs.stop - taken, len(found)))
            taken += len(found)
            if not wanted:
                continue
            if not found.requires_grad:
                raise QueryError("The quantity does not depend on the model's parameters, so it has no effects.")
            chosen = torch.eye(len(found), dtype=found.dtype, device=device)[wanted.start : wanted.stop]
            for mine, part in zip(rows, pull_back([found], parameters, [chosen]), strict=True):
                mine.append(part)
        return [torch.cat(parts) for parts in rows]


def _count_inputs(asked: Asked, axis: int) -> int:
    """Return how many inputs were asked about."""
    model = evaluation_copy(asked.model)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    taken = 0
    with torch.no_grad():
        for batch in asked.batches:
            taken += len(quantity_of_batch(model, move(batch, device), asked.targets, taken, asked.quantity, axis))
    return taken


def _is_same(parameter: Tensor, expected: Tensor) -> bool:
    """Say whether a parameter is the expected one, up to the rounding of one that was rebuilt from patterns."""
    if parameter.shape != expected.shape:
        return False
    apart = float((parameter.to(expected) - expected).double().norm())
    return apart <= SAME * float(expected.double().norm())


def _state_bytes(state: Mapping[str, Any]) -> int:
    return sum(entry.nbytes for entry in state.values() if isinstance(entry, Tensor))


def _labels(step: RetracedStep, parts: Sequence[str | Bins], rows: int) -> list[Any]:
    """Return the group of each row of a step's batch."""
    columns = [_values(step, part, rows) for part in parts]
    return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))


def _values(step: RetracedStep, part: str | Bins, rows: int) -> list[Any]:
    """Return the value of one column in each row of a step's batch."""
    name = part.column if isinstance(part, Bins) else part
    if name == STEP:
        given: Any = [step.number] * rows
    elif name in step.columns:
        given = step.columns[name]
    else:
        known = ", ".join([*step.columns, STEP])
        raise SelectionError(
            f"Unrolled effects know the columns of a batch, and there is no {name!r}: Restartable(columns=...) gives "
            f"{known}."
        )
    values = np.asarray(given.detach().cpu() if isinstance(given, Tensor) else given)
    if not values.ndim:
        values = np.broadcast_to(values, (rows,))
    if values.ndim > 1 and len(values) == rows:
        flat = values.reshape(rows, -1)
        if not (flat == flat[:, :1]).all():
            raise SelectionError(
                f"Column {name!r} has several values in one sample. Unrolled effects are those of whole samples: group "
                "by a column with one value for each."
            )
        values = flat[:, 0]
    if len(values) != rows:
        raise SelectionError(
            f"Column {name!r} has {len(values)} values in step {step.number}; loss(model, batch) gave {rows} losses."
        )
    found: list[Any] = bin_edges(pa.array(values), part).to_pylist() if isinstance(part, Bins) else values.tolist()
    return found
