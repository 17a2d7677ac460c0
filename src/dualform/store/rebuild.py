"""The weights that a stored run implies: what is left of the start, plus the kept patterns' shares.

`weight = start + share`, each parameter summed over all layers that use it, in float64 over float32 products.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from dualform.algebra import rebuild, rebuild_bias
from dualform.coefficients.family import Of
from dualform.store.reader import Run
from dualform.store.stream import Keep, everything, stream


def starts(run: Run, *, horizon: int, of: Of = "parameter") -> dict[str, Tensor]:
    """Return what `horizon` steps of decay and momentum left of each exactly recorded parameter's start, in float64."""
    left = {}
    for name in run.exact_parameters():
        initial = run.initial[name]
        found, _ = run.coefficients(name, horizon, of)
        left[name] = found.start * initial.double()
        if name in run.initial_buffers:
            left[name] += found.buffer * run.initial_buffers[name].double()
    return left


def shares(
    run: Run,
    *,
    horizon: int,
    keep: Keep = everything,
    layers: Collection[str] | None = None,
    of: Of = "parameter",
) -> dict[str, Tensor]:
    """Return the kept patterns' share of each parameter, in float64.

    Args:
        run: the run to read.
        horizon: the number of steps after which the parameters are wanted.
        keep: which patterns to keep.
        layers: the layers to sum over; by default every one with values.
        of: the share of the parameter, or of its momentum buffer.
    """
    if layers is None:
        layers = [name for name, entry in run.manifest.layers.items() if entry.store != "keys"]
    total: dict[str, Tensor] = {}
    for layer in layers:
        entry = run.require_values(layer)
        for parameter in entry.parameters.values():
            shape = run.manifest.parameters[parameter].shape
            total.setdefault(parameter, torch.zeros(shape, dtype=torch.float64))
        for chunk in stream(run, layer, horizon=horizon, keep=keep, values=True, of=of):
            assert chunk.values is not None, "values were asked for"
            if chunk.weight is not None:
                total[entry.parameters["weight"]] += rebuild(chunk.values, chunk.keys, chunk.weight)
            if chunk.bias is not None:
                total[entry.parameters["bias"]] += rebuild_bias(chunk.values, chunk.bias)
    return total


def tensors(run: Run, *, horizon: int, of: Of = "parameter") -> dict[str, Tensor]:
    """Return every exactly recorded parameter (or momentum buffer) after `horizon` steps, in float64."""
    left = starts(run, horizon=horizon, of=of)
    return {name: left[name] + share for name, share in shares(run, horizon=horizon, of=of).items()}
