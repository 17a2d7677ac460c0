"""How many bytes a recording will take, from one example batch, before it takes them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dualform.identity.parameter_use import takes_ids
from dualform.identity.unfolding import Unfolding
from dualform.modes import evaluating
from dualform.recording.layer_hooks import CaughtCall, catch_calls
from dualform.recording.processes import refuse_wrapped, unwrap_model
from dualform.recording.watch import Dtype, Layers, What, stored_dtype, stores_inputs, watch
from dualform.torch_modes import without_gradients

if TYPE_CHECKING:
    from dualform.recording.keep import Keep, Shares
    from dualform.recording.watch import Watched


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes of keys and values, or of shares, per layer over a whole run; tables and annotations add a little.

    Attributes:
        steps: how many steps.
        layers: bytes on disk by layer.
        device: bytes that shares take on the training device, or where they are kept; 0 without shares.
        free: bytes that are free there now; None where nobody knows.
    """

    steps: int
    layers: Mapping[str, int]
    device: int = 0
    free: int | None = None

    @property
    def total(self) -> int:
        """Bytes of all layers."""
        return sum(self.layers.values())

    def __repr__(self) -> str:
        rows = [(name, size) for name, size in self.layers.items()] + [("total", self.total)]
        width = max(len(name) for name, _ in rows)
        lines = [f"Estimate for {self.steps} steps"]
        lines += [f"  {name:<{width}}  {size_text(size):>9}" for name, size in rows]
        if self.device:
            free = "" if self.free is None else f", where {size_text(self.free)} are free"
            lines.append(f"and {size_text(self.device)} of memory for shares while training{free}")
        return "\n".join(lines)


def estimate(
    model: nn.Module,
    inputs: Any,
    *,
    steps: int,
    layers: Layers = None,
    dtype: Dtype = None,
    keep: "Keep | Sequence[Keep] | None" = None,
) -> Estimate:
    """Say how many bytes a recording will take, per layer, if every step sees a batch like this one.

    Shares take what so many groups take as they may have (`Shares(groups=...)`), under an optimizer that keeps one
    average of the gradients (momentum, or a first moment); `device` says how much memory that is while training.

    >>> estimate(nn.Linear(3, 2), torch.zeros(10, 3), steps=100).total
    20000
    """
    from dualform.recording.keep import divided  # which imports much, and `size_text` is imported everywhere

    model = unwrap_model(model)
    refuse_wrapped(model)
    patterns, shares = divided(keep)
    watched = watch(model, layers, patterns=False if patterns is None else patterns.layers)
    sizes = dict.fromkeys((layer.name for layer in watched), 0)
    device, free = 0, None
    if shares is not None:
        device, free = _add_shares(sizes, watched, shares)
    if patterns is not None:
        chosen = [layer for layer in watched if not layer.shares_only]
        dtype = dtype if patterns.dtype is None else patterns.dtype
        _add_patterns(sizes, model, inputs, chosen, dtype, steps, with_inputs=shares is None)
    return Estimate(steps, sizes, device, free)


def _add_patterns(
    sizes: dict[str, int],
    model: nn.Module,
    inputs: Any,
    watched: "Sequence[Watched]",
    dtype: Dtype,
    steps: int,
    *,
    with_inputs: bool,
) -> None:
    """Add the bytes of some layers' keys and values over so many steps.

    Args:
        sizes: bytes by layer.
        model: the model.
        inputs: an example batch.
        watched: the layers.
        dtype: what patterns are stored in.
        steps: the number of steps.
        with_inputs: whether inputs of convolutions are stored in place of keys, where that is exact and takes less.
    """
    with catch_calls({layer.name: layer for layer in watched}) as caught:
        forward(model, inputs)
    for layer in watched:
        patterns = sum(math.prod(call.leading) for call in caught[layer.name])
        trained = next(iter(layer.parameters.values()))[1].dtype
        what: What = "keys" if layer.keys_only else "keys+values"
        stored = stored_dtype(dtype, layer.name) or str(trained).removeprefix("torch.")
        size = row_bytes(layer.d_in, layer.d_out, stored, what, integer=takes_ids(layer.parameters))
        sizes[layer.name] += steps * patterns * size
        unfolding = layer.kind.unfolding(layer.module) if with_inputs else None
        if unfolding is not None and stores_inputs(unfolding, stored_dtype(dtype, layer.name), trained):
            keys = row_bytes(layer.d_in, layer.d_out, stored, "keys", integer=False)
            elements = sum(_stored_elements(layer, unfolding, call) for call in caught[layer.name])
            sizes[layer.name] += steps * (trained.itemsize * elements - patterns * keys)


def _stored_elements(layer: "Watched", unfolding: Unfolding, call: CaughtCall) -> int:
    """Return how many elements of a call are stored, of its inputs or of its keys, whichever are fewer."""
    inputs = layer.kind.repeated_inputs(layer.module, call.inputs)
    return inputs.numel() if unfolding.is_smaller(inputs.shape[2:]) else math.prod(call.leading) * layer.d_in


def _add_shares(sizes: dict[str, int], watched: "Sequence[Watched]", shares: "Shares") -> tuple[int, int | None]:
    """Add the bytes of layers' shares on disk; return those that they take in memory, and those that are free there."""
    from dualform.recording.share_bytes import fold_dtype, free_bytes, path_bytes, share_bytes  # see above

    groups = shares.groups * len(shares.groupings)
    each: dict[str, int] = {}
    uses: dict[str, list[str]] = {}
    for layer in watched:
        if layer.keys_only:
            continue
        mine = {
            name: parameter.numel() * fold_dtype(parameter.dtype).itemsize
            for name, parameter in layer.parameters.values()
        }
        for name in mine:
            uses.setdefault(name, []).append(layer.name)
        each |= mine
        one = share_bytes({name: [layer.name] for name in mine}, mine, dict.fromkeys(mine, 1), groups=groups)
        earlier = sum(size * (groups + 2) for size in mine.values())  # at each of the chosen steps
        last = one.disk if shares.resumable else sum(size * (groups + 1) for size in mine.values())
        sizes[layer.name] += last + len(shares.at) * earlier
    place = next((parameter.device for layer in watched for _, parameter in layer.parameters.values()), None)
    device = torch.device(shares.device) if shares.device is not None else place or torch.device("cpu")
    need = share_bytes(uses, each, dict.fromkeys(each, 1), groups=groups).device + path_bytes(each, shares)
    return need, free_bytes(device)


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
