"""Queries: what each layer is asked, captured by one forward pass of the model or given as tensors."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dualform.engine.description import LayerEntry
from dualform.engine.model_layers import find_watched, move
from dualform.errors import QueryError
from dualform.recording.estimate import forward
from dualform.recording.layer_hooks import catch_keys
from dualform.recording.watch import Watched


@dataclass(frozen=True, slots=True)
class Captured:
    """The queries of one layer.

    Attributes:
        rows: (Q, d_in)
        leading: the shape of the layer's input without the last axis, if all batches agree on all but the first axis;
            `rows.reshape(*leading, d_in)` is the input then. Otherwise just (Q,).
        batch_axis: which of these axes is the batch, where the layer's kind decides that (a recurrent layer's is 1).
    """

    rows: Tensor
    leading: tuple[int, ...]
    batch_axis: int = 0


def capture_queries(model: nn.Module, inputs: Any, layers: Mapping[str, LayerEntry]) -> dict[str, Captured]:
    """Run the model once in eval mode and keep every wanted layer's input.

    Args:
        model: the model, on the device to compute on.
        inputs: a tensor; a tuple of the model's arguments; a mapping of its keywords; or an iterable of such batches.
        layers: the layers that are wanted, as they were recorded.
    """
    watched = find_watched(model, layers)
    queries = {}
    for name, calls in capture_calls(model, inputs, watched).items():
        if not calls:
            raise QueryError(f"Layer {name!r} was not called in the forward pass, so it has no queries.")
        tails = {call.shape[1:-1] for call in calls if call.dim() > 1}
        rows = torch.cat([call.reshape(-1, call.shape[-1]) for call in calls])
        agree = len(tails) == 1 and all(call.dim() > 1 for call in calls)
        leading = (sum(call.shape[0] for call in calls), *tails.pop()) if agree else (len(rows),)
        queries[name] = check(name, layers[name], Captured(rows, leading, watched[name].kind.batch_axis or 0))
    return queries


def capture_calls(model: nn.Module, inputs: Any, watched: Mapping[str, Watched]) -> dict[str, list[Tensor]]:
    """Run the model once in eval mode and return every watched layer's inputs (..., d_in), call by call."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with catch_keys(watched) as caught:
        for batch in batches(inputs):
            forward(model, move(batch, device))
    return caught


def given_queries(queries: Mapping[str, Tensor], layers: Mapping[str, LayerEntry]) -> dict[str, Captured]:
    """Take query tensors of shape (..., d_in), by layer."""
    given = {}
    for name, rows in queries.items():
        if not isinstance(rows, Tensor) or not rows.dim() or rows.shape[-1] != layers[name].d_in:
            shape = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
            raise QueryError(
                f"Queries for layer {name!r} are {shape}; expected a tensor (..., {layers[name].d_in}), "
                f"as wide as its keys."
            )
        flat = rows.detach().reshape(-1, rows.shape[-1])
        given[name] = check(name, layers[name], Captured(flat, tuple(rows.shape[:-1])))
    return given


def check(name: str, entry: LayerEntry, queries: Captured) -> Captured:
    """Raise unless the queries fit the layer."""
    if queries.rows.shape[-1] != entry.d_in:
        raise QueryError(
            f"Queries for layer {name!r} are {queries.rows.shape[-1]} wide; its keys are {entry.d_in} wide."
        )
    if not len(queries.rows):
        raise QueryError(f"There are no queries for layer {name!r}: the inputs are empty. Give at least one.")
    return queries


def batches(inputs: Any) -> Iterator[Any]:
    """Yield what the model is called with, one batch after the other."""
    if isinstance(inputs, Tensor | tuple | Mapping):
        yield inputs
    elif isinstance(inputs, Iterable):
        empty = True
        for batch in inputs:
            empty = False
            yield batch
        if empty:
            raise QueryError("The inputs are an empty iterable. Give at least one batch.")
    else:
        raise QueryError(
            f"Inputs are a {type(inputs).__name__}; expected a tensor, a tuple, a mapping, or an iterable of batches."
        )
