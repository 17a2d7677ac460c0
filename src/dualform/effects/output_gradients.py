"""The gradient of a quantity of each test input at every layer's output: what effects are measured along.

One forward and one backward pass in eval mode. The inputs of a batch do not see each other then, so that the gradient
of the sum of their quantities is at each row the gradient of its own input's. The model's gradients stay as they are.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from dualform.engine.description import LayerEntry
from dualform.engine.model_layers import find_watched, move
from dualform.errors import QueryError
from dualform.logits import logits_of
from dualform.modes import evaluating
from dualform.recording.layer_hooks import CaughtCall, catch_calls
from dualform.recording.watch import Watched
from dualform.torch_modes import with_gradients

Named = Literal["margin", "logit", "loss"]
Quantity = Named | Callable[[Any, Any], Tensor]
"""Of the model's outputs and the targets: a name, or a function that returns a number per input, (B,)."""

IGNORED = -100  # a target that counts for nothing, as in torch's cross-entropy


@dataclass(frozen=True, slots=True, eq=False)
class OutputGradients:
    """The gradients of a quantity at one layer's output.

    Attributes:
        quantity: its name.
        rows: (Q, d_out), in the order of the layer's queries.
        of: (Q,) which input each query belongs to.
        inputs: how many inputs there are, M.
    """

    quantity: str
    rows: Tensor
    of: Tensor
    inputs: int


def find_output_gradients(
    model: nn.Module,
    batches: Sequence[Any],
    targets: Tensor | None,
    quantity: Quantity,
    layers: Mapping[str, LayerEntry],
    *,
    batch_axis: int,
) -> dict[str, OutputGradients]:
    """Find the gradient of a quantity at every wanted layer's output.

    Args:
        model: the model, on the device to compute on.
        batches: what it is called with, one after the other.
        targets: of all inputs together; by default what the model says.
        quantity: the quantity that effects are predicted for.
        layers: the layers that are wanted, as they were recorded.
        batch_axis: which leading axis of inputs and outputs counts the inputs.
    """
    if not callable(quantity) and quantity not in get_args(Named):
        raise QueryError(f"quantity is {quantity!r}; expected one of {get_args(Named)}, or a function.")
    if callable(quantity):
        _check_takes_two(quantity)
    watched = find_watched(model, layers)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    rows: dict[str, list[Tensor]] = {name: [] for name in layers}
    of: dict[str, list[Tensor]] = {name: [] for name in layers}
    taken = 0
    for batch in batches:
        backward = run_backward(model, move(batch, device), targets, taken, quantity, watched, batch_axis)
        count = len(backward.quantity)
        for name, found in backward.calls.items():
            for call in found:
                rows[name].append(call.values(torch.zeros(0, device=device)))
                of[name].append(taken + inputs_of_queries(call, count, batch_axis).to(device))
        taken += count
    if targets is not None and targets.shape[batch_axis] != taken:
        raise QueryError(f"There are {targets.shape[batch_axis]} targets for {taken} inputs.")
    name = getattr(quantity, "__name__", "quantity") if callable(quantity) else quantity
    gradients = {}
    for layer, parts in rows.items():
        joined = torch.cat(parts)
        if not bool(torch.isfinite(joined).all()):
            raise QueryError(f"The gradient of the {name} at layer {layer!r} is not finite. Is the model's output?")
        gradients[layer] = OutputGradients(name, joined, torch.cat(of[layer]), taken)
    return gradients


def measure_quantity(outputs: Any, targets: Tensor | None, quantity: Quantity, *, batch_axis: int = 0) -> Tensor:
    """Return the quantity of each input of a batch, (B,).

    The margin is the target's logit less the log-sum-exp of all others; the loss is the cross-entropy. Where an input
    has several targets (tokens), all are means over them. `logits_of` finds the logits in the outputs.

    >>> measure_quantity(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), "margin")
    tensor([2.])
    """
    if callable(quantity):
        found = quantity(outputs, targets)
        if not isinstance(found, Tensor) or found.dim() != 1:
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise QueryError(f"The quantity is {shape}; expected a number per input, a tensor (B,).")
        return found
    logits = _class_logits(outputs, quantity)
    if targets is not None and not batch_axis and logits.dim() == 3 and targets.dim() == 1 and logits.shape[1] == 1:
        logits = logits[:, 0]  # a language model that computes the last position only
    wanted = logits.detach().argmax(dim=-1) if targets is None else targets.to(logits.device)
    if wanted.shape != logits.shape[:-1] or wanted.is_floating_point():
        raise QueryError(
            f"Targets are {wanted.dtype} {tuple(wanted.shape)} for logits {tuple(logits.shape)}; expected the number "
            "of a class for each. Where a model computes the last position only, give the last token's alone."
        )
    counted = wanted != IGNORED
    index = wanted.clamp(min=0)[..., None].long()
    if quantity == "margin":
        others = logits.scatter(-1, index, -torch.inf).logsumexp(dim=-1)
        each = logits.gather(-1, index)[..., 0] - others
    elif quantity == "logit":
        each = logits.gather(-1, index)[..., 0]
    else:
        each = -functional.log_softmax(logits, dim=-1).gather(-1, index)[..., 0]
    each = each.where(counted, 0.0).movedim(batch_axis, 0).flatten(1) if each.dim() > 1 else each[:, None]
    terms = counted.movedim(batch_axis, 0).flatten(1) if counted.dim() > 1 else counted[:, None]
    return each.sum(dim=1) / terms.sum(dim=1).clamp(min=1)


def _check_takes_two(quantity: Callable[..., Any]) -> None:
    """Raise unless a function can be called with the model's outputs and the targets."""
    try:
        signature = inspect.signature(quantity)
    except ValueError:  # a builtin that does not say what it takes
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        name = getattr(quantity, "__name__", type(quantity).__name__)
        raise QueryError(
            f"The quantity {name}{signature} was given; expected a function of the model's outputs and the targets "
            "that returns a number per input, for example lambda outputs, targets: outputs[:, 0]."
        ) from error


def _class_logits(outputs: Any, quantity: Named) -> Tensor:
    """Return the logits (..., classes) of a model's outputs, which a named quantity is made of."""
    logits = logits_of(outputs, instead="Give a function of the model's outputs as the quantity")
    if logits.dim() < 2 or not logits.is_floating_point():
        raise QueryError(
            f"A {quantity} needs logits (..., classes), but the model returned {logits.dtype} {tuple(logits.shape)}; "
            "give a function of the model's outputs instead."
        )
    return logits


@dataclass(frozen=True, slots=True, eq=False)
class BackwardPass:
    """One batch that was run forward and backward.

    Attributes:
        calls: every call of each watched layer, with the errors that came to its outputs.
        quantity: (B,) the quantity of each input.
    """

    calls: Mapping[str, list[CaughtCall]]
    quantity: Tensor


@with_gradients
def run_backward(
    model: nn.Module,
    batch: Any,
    targets: Tensor | None,
    first: int,
    quantity: Quantity,
    watched: Mapping[str, Watched],
    batch_axis: int,
    *,
    reach: Sequence[nn.Parameter] | None = None,
) -> BackwardPass:
    """Run a batch forward, and the sum of its inputs' quantities backward; the model's gradients stay as they are.

    Args:
        model: the model.
        batch: what it is called with, on its device.
        targets: of all inputs of all batches.
        first: the number of this batch's first input among them.
        quantity: the quantity.
        watched: the layers to watch.
        batch_axis: which leading axis of inputs and outputs counts the inputs.
        reach: parameters that the backward has to come to, by default all; a few small ones (biases) in each watched
            layer spare it the gradients of the large ones.
    """
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]

    def freeze() -> None:
        for parameter in frozen:
            parameter.requires_grad_(False)

    with catch_calls(watched) as calls:
        try:
            for parameter in frozen:
                parameter.requires_grad_(parameter.is_floating_point())
            found = quantity_of_batch(model, batch, targets, first, quantity, batch_axis)
            if not found.requires_grad:
                raise QueryError("The quantity does not depend on the model's parameters, so it has no effects.")
            wanted = [p for p in (model.parameters() if reach is None else reach) if p.requires_grad]
            torch.autograd.grad(found.sum(), wanted, allow_unused=True)
        finally:
            try:
                freeze()
            finally:
                freeze()  # once more: an interrupt may have cut the first short
    return BackwardPass(calls, found.detach())


def quantity_of_batch(
    model: nn.Module, batch: Any, targets: Tensor | None, first: int, quantity: Quantity, batch_axis: int
) -> Tensor:
    """Return the quantity of each input of a batch, (B,), in eval mode; arguments as those of `run_backward`."""
    with evaluating(model):
        if isinstance(batch, Mapping):
            outputs = model(**batch)
        else:
            outputs = model(*batch) if isinstance(batch, tuple) else model(batch)
    size = _batch_size(batch if callable(quantity) else _class_logits(outputs, quantity), batch_axis)
    part = None if targets is None else _slice(targets, first, size, batch_axis)
    return measure_quantity(outputs, part, quantity, batch_axis=batch_axis)


def inputs_of_queries(call: CaughtCall, count: int, batch_axis: int) -> Tensor:
    """Return which input of its batch each query of a call belongs to, (n,)."""
    own = call.layer.kind.batch_axis
    axis, leading = batch_axis if own is None else own, call.leading
    if len(leading) > axis and leading[axis] == count:
        shape = [count if i == axis else 1 for i in range(len(leading))]
        return torch.arange(count).reshape(shape).expand(leading).reshape(-1)
    rows = math.prod(leading)
    if count and rows % count == 0:  # a layer that saw the batch flattened
        order = torch.arange(rows)
        return order % count if batch_axis else order // (rows // count)
    raise QueryError(f"Layer {call.layer.name!r} saw {leading} rows for {count} inputs: they cannot be told apart.")


def _batch_size(batch: Any, axis: int) -> int:
    """Return how many inputs a batch has, from the first tensor in it."""
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    parts = batch if isinstance(batch, tuple) else (batch,)
    return next((int(p.shape[axis]) for p in parts if isinstance(p, Tensor) and p.dim() > axis), 0)


def _slice(targets: Tensor, first: int, size: int, axis: int) -> Tensor:
    """Return the targets of one batch."""
    if targets.dim() <= axis or targets.shape[axis] < first + size:
        raise QueryError(f"Targets are {tuple(targets.shape)}; expected one for each input, of which there are more.")
    return targets.narrow(axis, first, size)


class Contrast:
    """The difference of two logits: how much more the model says one class than another."""

    def __init__(self, said: int, instead_of: int) -> None:
        self._said = said
        self._instead_of = instead_of
        self.__name__ = f"logit of {said} rather than {instead_of}"

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """Return the difference for each input, (B,); at the last position, where there are several."""
        logits = logits_of(outputs, instead="Give a function of the model's outputs as the quantity")
        if max(self._said, self._instead_of) >= logits.shape[-1] or min(self._said, self._instead_of) < 0:
            raise QueryError(
                f"contrast({self._said}, {self._instead_of}) names a class that the model does not have: there are "
                f"{logits.shape[-1]} logits, from 0 on."
            )
        last = logits[:, -1] if logits.dim() == 3 else logits
        return last[:, self._said] - last[:, self._instead_of]


def contrast(said: int, instead_of: int) -> Contrast:
    """Return the quantity "this class rather than that one", for `memory.attend(..., quantity=...)`.

    >>> contrast(1, 0)(torch.tensor([[0.5, 2.0]]), None)
    tensor([1.5000])
    """
    return Contrast(said, instead_of)
