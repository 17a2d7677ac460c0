"""What is asked of effects: a quantity of each test input, and its gradient at every layer's output.

One forward and one backward pass in eval mode. The inputs of a batch do not see each other then, so that the gradient
of the sum of their quantities is at each row the gradient of its own input's. The model's gradients stay as they are.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from dualform.attend.queries import find_watched, move
from dualform.errors import QueryError
from dualform.modes import evaluating
from dualform.record.hooks import _hookable, trace
from dualform.record.watch import Watched
from dualform.store.format import LayerEntry

Named = Literal["margin", "loss"]
Quantity = Named | Callable[[Any, Any], Tensor]
"""Of the model's outputs and the targets: `"margin"`, `"loss"`, or a function that returns a number per input, (B,)."""

IGNORED = -100  # a target that counts for nothing, as in torch's cross-entropy


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
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


@dataclass(slots=True, eq=False)
class _Call:
    """One call of a layer, from its forward on."""

    layer: Watched
    inputs: Any
    leading: tuple[int, ...]
    errors: list[Tensor | None]

    def values(self, like: Tensor) -> Tensor:
        """Return the gradients at its outputs, (n, d_out)."""
        if all(error is None for error in self.errors):  # the quantity does not depend on this call
            return like.new_zeros(math.prod(self.leading), self.layer.d_out)
        kind = self.layer.kind
        return kind.errors(self.layer.module, self.inputs, self.errors).detach().reshape(-1, self.layer.d_out)


def ask(
    model: nn.Module,
    batches: Sequence[Any],
    targets: Tensor | None,
    quantity: Quantity,
    layers: Mapping[str, LayerEntry],
    *,
    batch_axis: int,
) -> dict[str, Asked]:
    """Find the gradient of a quantity at every wanted layer's output.

    Args:
        model: the model, on the device to compute on.
        batches: what it is called with, one after the other.
        targets: of all inputs together; by default what the model says.
        quantity: what is asked about.
        layers: the layers that are wanted, as they were recorded.
        batch_axis: which leading axis of inputs and outputs counts the inputs.
    """
    if not callable(quantity) and quantity not in get_args(Named):
        raise QueryError(f"quantity is {quantity!r}; expected one of {get_args(Named)}, or a function.")
    watched = find_watched(model, layers)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    rows: dict[str, list[Tensor]] = {name: [] for name in layers}
    of: dict[str, list[Tensor]] = {name: [] for name in layers}
    taken = 0
    for batch in batches:
        calls, count = _backward(model, move(batch, device), targets, taken, quantity, watched, batch_axis)
        for name, found in calls.items():
            for call in found:
                rows[name].append(call.values(torch.zeros(0, device=device)))
                of[name].append(taken + _inputs(call, count, batch_axis).to(device))
        taken += count
    if targets is not None and targets.shape[batch_axis] != taken:
        raise QueryError(f"There are {targets.shape[batch_axis]} targets for {taken} inputs.")
    name = getattr(quantity, "__name__", "quantity") if callable(quantity) else quantity
    asked = {}
    for layer, parts in rows.items():
        joined = torch.cat(parts)
        if not bool(torch.isfinite(joined).all()):
            raise QueryError(f"The gradient of the {name} at layer {layer!r} is not finite. Is the model's output?")
        asked[layer] = Asked(name, joined, torch.cat(of[layer]), taken)
    return asked


def measure(outputs: Any, targets: Tensor | None, quantity: Quantity, *, batch_axis: int = 0) -> Tensor:
    """Return the quantity of each input of a batch, (B,).

    The margin is the target's logit less the log-sum-exp of all others; the loss is the cross-entropy. Where an input
    has several targets (tokens), both are means over them.

    >>> measure(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), "margin")
    tensor([2.])
    """
    if callable(quantity):
        found = quantity(outputs, targets)
        if not isinstance(found, Tensor) or found.dim() != 1:
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise QueryError(f"The quantity is {shape}; expected a number per input, a tensor (B,).")
        return found
    if not isinstance(outputs, Tensor) or outputs.dim() < 2:
        raise QueryError(f"A {quantity} needs logits (..., classes); give a function of the model's outputs instead.")
    wanted = outputs.detach().argmax(dim=-1) if targets is None else targets.to(outputs.device)
    if wanted.shape != outputs.shape[:-1] or wanted.is_floating_point():
        raise QueryError(
            f"Targets are {wanted.dtype} {tuple(wanted.shape)} for logits {tuple(outputs.shape)}; expected the number "
            "of a class for each."
        )
    counted = wanted != IGNORED
    index = wanted.clamp(min=0)[..., None].long()
    if quantity == "margin":
        others = outputs.scatter(-1, index, -torch.inf).logsumexp(dim=-1)
        each = outputs.gather(-1, index)[..., 0] - others
    else:
        each = -functional.log_softmax(outputs, dim=-1).gather(-1, index)[..., 0]
    each = each.where(counted, 0.0).movedim(batch_axis, 0).flatten(1) if each.dim() > 1 else each[:, None]
    terms = counted.movedim(batch_axis, 0).flatten(1) if counted.dim() > 1 else counted[:, None]
    return each.sum(dim=1) / terms.sum(dim=1).clamp(min=1)


def _backward(
    model: nn.Module,
    batch: Any,
    targets: Tensor | None,
    first: int,
    quantity: Quantity,
    watched: Mapping[str, Watched],
    batch_axis: int,
) -> tuple[dict[str, list[_Call]], int]:
    """Return every call of the watched layers with the errors that came to its outputs, and the number of inputs."""
    calls: dict[str, list[_Call]] = {name: [] for name in watched}
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    fast = torch.backends.mha.get_fastpath_enabled()
    handles = _listen(watched, calls)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        for parameter in frozen:
            parameter.requires_grad_(parameter.is_floating_point())
        with evaluating(model), torch.enable_grad():
            if isinstance(batch, Mapping):
                outputs = model(**batch)
            else:
                outputs = model(*batch) if isinstance(batch, tuple) else model(batch)
            size = _size(batch if callable(quantity) else outputs, batch_axis)
            part = None if targets is None else _slice(targets, first, size, batch_axis)
            found = measure(outputs, part, quantity, batch_axis=batch_axis)
            if not found.requires_grad:
                raise QueryError("The quantity does not depend on the model's parameters, so it has no effects.")
            torch.autograd.grad(found.sum(), [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for handle in handles:
            handle.remove()
        for parameter in frozen:
            parameter.requires_grad_(False)
    return calls, len(found)


def _listen(watched: Mapping[str, Watched], calls: Mapping[str, list[_Call]]) -> list[Any]:
    """Put hooks on the layers that note their calls and wait for the errors at their outputs."""
    handles: list[Any] = []

    def note(name: str, layer: Watched, inputs: Any, outputs: Sequence[Tensor]) -> None:
        leading = tuple(layer.kind.keys(layer.module, inputs).shape[:-1])
        call = _Call(layer, inputs, leading, [None] * len(outputs))
        calls[name].append(call)
        for i, output in enumerate(outputs):

            def arrive(error: Tensor | None, i: int = i, shape: torch.Size = output.shape) -> None:
                if error is not None:
                    call.errors[i] = error.detach().reshape(shape)

            if output.requires_grad:
                _hookable(output).register_hook(arrive)

    composites: dict[int, dict[str, tuple[str, Watched]]] = {}
    for name, layer in watched.items():
        if layer.composite is not None:
            composites.setdefault(id(layer.module), {})[layer.part] = (name, layer)
            continue

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Tensor, n: str = name, w: Watched = layer) -> None:
            if module is w.module:
                note(n, w, w.kind.inputs(args, kwargs).detach().clone(), [output])

        handles.append(layer.module.register_forward_hook(hook, prepend=True, with_kwargs=True))
    for parts in composites.values():

        def report(part: str, inputs: Any, outputs: Sequence[Tensor], parts: Any = parts) -> None:
            if part in parts:
                name, layer = parts[part]
                note(name, layer, inputs, outputs)

        handles.extend(trace([layer for _, layer in parts.values()], report))
    return handles


def _inputs(call: _Call, count: int, batch_axis: int) -> Tensor:
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


def _size(batch: Any, axis: int) -> int:
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
