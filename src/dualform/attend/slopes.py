"""How one of the model's outputs moves with the output of each layer: the gradient, at one input.

What a group adds to a layer's output, projected on this, is what it adds to the model's output: exactly in the last
layer, and in the others as far as the network is linear there (between ReLUs: while no unit switches).
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from dualform.record.watch import plain_name


def output_rows(output: Any) -> Tensor:
    """Return what a model gave for one input as rows of outputs, (rows, classes): one, or one per position."""
    first = output[0] if isinstance(output, tuple | list) else getattr(output, "logits", output)
    return first.reshape(-1, first.shape[-1]) if first.dim() else first.reshape(1, 1)


def slopes(model: nn.Module, inputs: Tensor, layers: Collection[str], *, row: int, unit: int) -> dict[str, Tensor]:
    """Return d output[row, unit] / d (layer's output), layer -> (rows, d_out); zero where it does not depend on it.

    Not safe to be called for one model by several threads at once.
    """
    found: dict[str, list[Tensor]] = {name: [] for name in layers}
    handles = []

    def keep(name: str, output: Any) -> Any:
        if not isinstance(output, Tensor):
            return None
        found[name].append(output)
        return output.clone()  # an activation that works in place must not change what was kept

    for path, module in model.named_modules():
        name = plain_name(path)
        if name in found:
            handles.append(module.register_forward_hook(lambda _m, _i, output, name=name: keep(name, output)))
    training = model.training
    model.eval()
    try:
        with torch.enable_grad():
            rows = output_rows(model(inputs))
            every = [output for outputs in found.values() for output in outputs]
            kept = [output for output in every if output.requires_grad]
            gradients = torch.autograd.grad(rows[row, unit], kept, allow_unused=True) if kept else ()
    finally:
        for handle in handles:
            handle.remove()
        model.train(training)
    by_output = {id(output): gradient for output, gradient in zip(kept, gradients, strict=True)}
    return {
        name: torch.cat([_rows(output, by_output.get(id(output))) for output in outputs])
        for name, outputs in found.items()
        if outputs
    }


def _rows(output: Tensor, gradient: Tensor | None) -> Tensor:
    whole = torch.zeros_like(output) if gradient is None else gradient
    return whole.detach().reshape(-1, whole.shape[-1])
