"""How many bytes a recording will take, from one example batch, before it takes them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dualform.identity.parameter_use import takes_ids
from dualform.modes import evaluating
from dualform.recording.layer_hooks import catch_keys
from dualform.recording.processes import refuse_wrapped
from dualform.recording.watch import Dtype, Layers, What, stored_dtype, watch
from dualform.torch_modes import without_gradients


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes of keys and values per layer over a whole run; tables and annotations add a little."""

    steps: int
    layers: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes of all layers."""
        return sum(self.layers.values())

    def __repr__(self) -> str:
        rows = [(name, size) for name, size in self.layers.items()] + [("total", self.total)]
        width = max(len(name) for name, _ in rows)
        return f"Estimate for {self.steps} steps\n" + "\n".join(
            f"  {name:<{width}}  {size_text(size):>9}" for name, size in rows
        )


def estimate(
    model: nn.Module,
    inputs: Any,
    *,
    steps: int,
    layers: Layers = None,
    dtype: Dtype = None,
) -> Estimate:
    """Say how many bytes a recording will take, per layer, if every step sees a batch like this one.

    >>> estimate(nn.Linear(3, 2), torch.zeros(10, 3), steps=100).total
    20000
    """
    refuse_wrapped(model)
    watched = watch(model, layers)
    with catch_keys({layer.name: layer for layer in watched}) as caught:
        forward(model, inputs)
    sizes = {}
    for layer in watched:
        patterns = sum(keys.numel() // layer.d_in for keys in caught[layer.name])
        trained = next(iter(layer.parameters.values()))[1].dtype
        what: What = "keys" if layer.keys_only else "keys+values"
        stored = stored_dtype(dtype, layer.name) or str(trained).removeprefix("torch.")
        size = row_bytes(layer.d_in, layer.d_out, stored, what, integer=takes_ids(layer.parameters))
        sizes[layer.name] = steps * patterns * size
    return Estimate(steps, sizes)


def row_bytes(d_in: int, d_out: int, dtype: str, what: What, *, integer: bool) -> int:
    """Return the bytes that one pattern takes: its key and value, and a scale per float16 or int8 row.

    Keys that are stored once for many patterns (those of an input layer that sees each sample again) take less.

    >>> row_bytes(784, 800, "float16", "keys+values", integer=False)
    3176
    >>> row_bytes(768, 768, "int8", "keys", integer=False)
    772
    """
    itemsize: int = getattr(torch, dtype).itemsize
    scale = 4 if dtype in ("float16", "int8") else 0
    key = 8 * d_in if integer else itemsize * d_in + scale
    return key + (0 if what == "keys" else itemsize * d_out + scale)


@without_gradients
def forward(model: nn.Module, inputs: Any) -> Any:
    """Run the model once in eval mode without gradients; a tuple is its arguments, a mapping its keywords."""
    with evaluating(model):
        if isinstance(inputs, Mapping):
            return model(**inputs)
        if isinstance(inputs, tuple):
            return model(*inputs)
        return model(inputs)


def size_text(size: float) -> str:
    """Return a number of bytes for people.

    >>> size_text(1_234_567)
    '1.2 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
