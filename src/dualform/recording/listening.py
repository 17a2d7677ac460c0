"""Listen to a model's layers during one forward and backward pass: the keys of each call, and the errors that came.

For passes that ask a question of a model and train nothing. What training accumulates is noted in
`dualform.recording.hooks`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dualform.recording.hooks import hookable, trace
from dualform.recording.watch import Watched


@dataclass(slots=True, eq=False)
class ListenedCall:
    """One call of a layer, from its forward on."""

    layer: Watched
    inputs: Any
    leading: tuple[int, ...]  # the shape of its patterns
    errors: list[Tensor | None]  # at each output; nothing where none came

    @property
    def reached(self) -> bool:
        """Whether the backward pass came to any output of this call."""
        return any(error is not None for error in self.errors)

    def keys(self) -> Tensor:
        """Return the keys, (..., d_in)."""
        return self.layer.kind.keys(self.layer.module, self.inputs)

    def values(self, like: Tensor) -> Tensor:
        """Return the gradients at its outputs, (n, d_out); zeros where the backward pass did not come."""
        if not self.reached:
            return like.new_zeros(math.prod(self.leading), self.layer.d_out)
        kind = self.layer.kind
        return kind.errors(self.layer.module, self.inputs, self.errors).detach().reshape(-1, self.layer.d_out)


def listen(watched: Mapping[str, Watched], calls: Mapping[str, list[ListenedCall]]) -> list[Any]:
    """Put hooks on layers that add each call to `calls` and wait for the errors at its outputs; return the handles."""
    handles: list[Any] = []

    def note(name: str, layer: Watched, inputs: Any, outputs: Sequence[Tensor]) -> None:
        leading = tuple(layer.kind.keys(layer.module, inputs).shape[:-1])
        call = ListenedCall(layer, inputs, leading, [None] * len(outputs))
        calls[name].append(call)
        for i, output in enumerate(outputs):

            def arrive(error: Tensor | None, i: int = i, shape: torch.Size = output.shape) -> None:
                if error is not None:
                    call.errors[i] = error.detach().reshape(shape)

            if output.requires_grad:
                hookable(output).register_hook(arrive)

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

        def report(part: str, inputs_of: Callable[[], Any], outputs: Sequence[Tensor], parts: Any = parts) -> None:
            if part in parts:
                name, layer = parts[part]
                note(name, layer, inputs_of(), outputs)

        handles.extend(trace([layer for _, layer in parts.values()], report))
    return handles
