"""How one of the model's outputs moves with the output of each layer: the gradient, at one input.

What a group adds to a layer's output, projected on this, is what it adds to the model's output: exactly in the last
layer, and in the others as far as the network is linear there (between ReLUs: while no unit switches).
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from dualform.logits import logits_of
from dualform.modes import evaluating
from dualform.recording.layers import find_kind
from dualform.recording.module_hooks import hook_forward, temporary_hooks
from dualform.recording.watch import plain_name
from dualform.torch_modes import with_gradients


def output_rows(output: Any) -> Tensor:
    """Return what a model gave as rows of outputs, (rows, classes), where the last axis holds the classes."""
    first = logits_of(output)
    return first.reshape(-1, first.shape[-1]) if first.dim() else first.reshape(1, 1)


@with_gradients
def slopes(model: nn.Module, inputs: Tensor, layers: Collection[str], *, unit: int) -> dict[str, Tensor]:
    """Return d output[last row, unit] / d (layer's output), layer -> (rows, d_out), for one input.

    Not safe to be called for one model by several threads at once.
    """
    calls: dict[str, list[tuple[nn.Module, Tensor, Tensor]]] = {name: [] for name in layers}

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, name: str) -> Any:
        kind = find_kind(module)
        if kind is None or not isinstance(output, Tensor):
            return None
        calls[name].append((module, kind.inputs(args, kwargs), output))
        return output.clone()  # an activation that works in place must not change the output that was noted

    device = next((parameter.device for parameter in model.parameters()), inputs.device)
    with temporary_hooks() as handles:
        for path, module in model.named_modules():
            if (name := plain_name(path)) in calls:
                hook = lambda m, a, k, o, name=name: keep(m, a, k, o, name)  # noqa: E731
                hook_forward(handles, module, hook)
        with evaluating(model):
            target = output_rows(model(inputs.to(device)))[-1, unit]
            outputs = [output for found in calls.values() for _, _, output in found if output.requires_grad]
            gradients = torch.autograd.grad(target, outputs, allow_unused=True) if outputs else ()
    by_output = {id(output): gradient for output, gradient in zip(outputs, gradients, strict=True)}
    found = {}
    for name, rows in calls.items():
        parts = []
        for module, given, output in rows:
            gradient = by_output.get(id(output))
            kind = find_kind(module)
            assert kind is not None, "only recorded kinds were noted"
            whole = torch.zeros_like(output) if gradient is None else gradient
            values = kind.values(module, given.detach(), whole.detach())
            parts.append(values.reshape(-1, values.shape[-1]))
        if parts:
            found[name] = torch.cat(parts)
    return found
