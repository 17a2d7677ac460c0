"""The recorded layers as they are found in a model, and a batch on the model's device: for asking a model questions."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dualform.engine.description import LayerEntry
from dualform.errors import QueryError
from dualform.recording.watch import Candidate, Watched, find_candidates, plain_name


def find_watched(model: nn.Module, layers: Mapping[str, LayerEntry]) -> dict[str, Watched]:
    """Return recorded layers as they are found in a model, or raise."""
    candidates = find_candidates(model)
    return {name: _find_layer(model, candidates.get(name), name, entry) for name, entry in layers.items()}


def _find_layer(model: nn.Module, candidate: Candidate | None, name: str, entry: LayerEntry) -> Watched:
    if candidate is None or candidate.kind.name != entry.kind:
        modules = {plain_name(path): module for path, module in model.named_modules()}
        module = modules.get(name) if candidate is None else candidate.module
        found = "there is no such module" if module is None else f"it is a {type(module).__name__}"
        raise QueryError(f"The memory has a {entry.kind} layer {name!r}, but in this model {found}.")
    widths = candidate.kind.widths(candidate.module)
    if widths != (entry.d_in, entry.d_out):
        raise QueryError(f"Layer {name!r} of this model maps {widths}; the memory's maps {(entry.d_in, entry.d_out)}.")
    return Watched(
        name=name,
        module=candidate.module,
        kind=candidate.kind,
        keys_only=entry.store == "keys",
        parameters={},
        d_in=entry.d_in,
        d_out=entry.d_out,
        composite=candidate.composite,
        part=candidate.part,
    )


def move(batch: Any, device: torch.device) -> Any:
    """Return a batch on a device."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, tuple | list):
        return tuple(move(part, device) for part in batch)
    if isinstance(batch, Mapping):
        return {name: move(part, device) for name, part in batch.items()}
    return batch
