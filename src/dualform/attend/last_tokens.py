"""Queries at the last token of a prompt: which row of each layer's input belongs to it, or why that cannot be told."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from dualform.attend.context import naming_failures
from dualform.attend.queries import Captured, capture_calls, check
from dualform.engine.description import LayerEntry
from dualform.engine.model_layers import find_watched
from dualform.errors import QueryError
from dualform.recording.watch import Watched

CallInputs = Mapping[str, Sequence[Tensor]]
OTHER_TOKENS = 3  # tokens that are tried in the last one's place


def last_queries(
    model: nn.Module, tokens: Tensor, layers: Mapping[str, LayerEntry], *, batch_axis: int = 0
) -> dict[str, Tensor]:
    """Return each layer's query at the last token of each row, (B, L) -> (B, d_in), or raise where one cannot be told.

    Args:
        model: the model, on the device to compute on.
        tokens: (B, L).
        layers: the layers that are wanted, as they were recorded.
        batch_axis: 1 for a model that takes tokens (L, B).
    """
    found: dict[str, Tensor] = {}
    watched = find_watched(model, layers)
    for name, calls in _capture(model, tokens, watched, batch_axis).items():
        rows = _last_rows(calls, watched[name], tuple(tokens.shape), batch_axis)
        if isinstance(rows, str):
            raise QueryError(f"Layer {name!r} {rows}. Ask about other layers: layers=[...].")
        found[name] = check(name, layers[name], Captured(rows, (len(rows),))).rows
    return found


def prompt_queries(
    model: nn.Module, tokens: Tensor, layers: Mapping[str, LayerEntry], *, batch_axis: int, vocabulary: int
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return each layer's query at the last token of one prompt, (1, d_in), and for other layers why they have none.

    A layer whose input has an axis of its own for the tokens is clear. A layer that saw one row for all tokens (a head
    that is computed at the last position only), or rows without a batch axis (a flattened batch, or an embedding of
    positions), is asked only if its row changes when the last token does.

    Args:
        model: the model, on the device to compute on.
        tokens: (1, L).
        layers: the layers that are wanted, as they were recorded.
        batch_axis: 1 for a model that takes tokens (L, B).
        vocabulary: the number of tokens that there are.
    """
    watched = find_watched(model, layers)
    shape = (1, tokens.shape[1])
    calls = _capture(model, tokens, watched, batch_axis)
    found: dict[str, Tensor] = {}
    reasons: dict[str, str] = {}
    doubtful: dict[str, Tensor] = {}
    for name, seen in calls.items():
        rows = _last_rows(seen, watched[name], shape, batch_axis)
        if isinstance(rows, str):
            other = _only_rows(seen, shape[1])
            if other is None:
                reasons[name] = rows
                continue
            doubtful[name] = rows = other
        elif seen[0].shape[:-1].numel() == 1 < shape[1] and len(seen) == 1:
            doubtful[name] = rows
        found[name] = check(name, layers[name], Captured(rows, (1,))).rows
    still = set(doubtful)
    for shift in range(1, 1 + min(OTHER_TOKENS, vocabulary - 1)):
        if not still:
            break
        changed = tokens.clone()
        changed[0, -1] = (changed[0, -1] + shift) % vocabulary
        again = _capture(model, changed, {name: watched[name] for name in still}, batch_axis)
        still = {name for name in still if not _moved(doubtful[name], calls[name], again[name])}
    for name in (name for name in doubtful if name in still):
        del found[name]
        reasons[name] = (
            f"saw {tuple(calls[name][0].shape[:-1])} for tokens {shape}, and its input there does not change with the "
            "last token: it may belong to positions, or to another token"
        )
    return found, reasons


def as_model_takes(tokens: Tensor, batch_axis: int) -> Tensor:
    """Return tokens (B, L) as the model takes them: (L, B) where its batch axis is 1."""
    return tokens.T if batch_axis == 1 else tokens


def _capture(model: nn.Module, tokens: Tensor, watched: Mapping[str, Watched], batch_axis: int) -> CallInputs:
    with naming_failures(tokens.shape[1]):
        return capture_calls(model, as_model_takes(tokens, batch_axis), watched)


def _last_rows(calls: Sequence[Tensor], layer: Watched, shape: tuple[int, ...], batch_axis: int) -> Tensor | str:
    """Return a layer's rows at the last token of each row of tokens, (B, d_in), or why they cannot be told."""
    rows, length = shape
    if not calls:
        return "was not called in the forward pass, so it has no queries"
    if len(calls) > 1:
        step_by_step = len(calls) == length and all(tuple(call.shape[:-1]) == (rows,) for call in calls)
        return calls[-1] if step_by_step else f"was called {len(calls)} times, so the last token has several queries"
    call = calls[0]
    leading = tuple(call.shape[:-1])
    axis = batch_axis if layer.kind.batch_axis is None else layer.kind.batch_axis
    if len(leading) == 2 and leading[axis] == rows and leading[1 - axis] in (1, length):
        return call.select(1 - axis, -1)
    if leading == (rows,) and (rows == 1 or rows != length):
        return call
    return (
        f"saw {leading} for tokens {shape}; expected an input (B, L, ...) or one row for each sequence, so that the "
        "last token's can be told"
    )


def _only_rows(calls: Sequence[Tensor], length: int) -> Tensor | None:
    """Return the last of a layer's rows, (1, d_in), where it saw one row for each token of one sequence."""
    if len(calls) != 1 or sorted(calls[0].shape[:-1])[-1:] != [length] or calls[0].shape[:-1].numel() != length:
        return None
    return calls[0].reshape(length, -1)[-1:]


def _moved(rows: Tensor, before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    """Say whether a layer saw the same shapes again, with another last row."""
    if [call.shape for call in before] != [call.shape for call in after]:
        return False
    return not torch.equal(rows.reshape(-1), after[-1].reshape(-1, after[-1].shape[-1])[-1])
