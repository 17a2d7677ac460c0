"""Models that several processes or replicas train together, which cannot be recorded in one of them."""

from collections.abc import Sequence

import torch
from torch import nn

from dualform.errors import RefusedError
from dualform.recording.watch import Watched, plain_name
from dualform.recording.world import World

_WRAPPERS = {
    "DataParallel": "several replicas, each of which sees",
    "DistributedDataParallel": "several processes, each of which sees",
    "FullyShardedDataParallel": "several processes, each of which holds a part of the weights and sees",
}


def refuse_wrapped(model: nn.Module) -> None:
    """Refuse a model of which any part is trained by several processes or replicas, or is divided among them."""
    for path, module in model.named_modules():
        kind, name = type(module).__name__, plain_name(path)
        where = f"{kind}{f' ({name!r})' if name else ''}"
        if kind in _WRAPPERS:
            raise RefusedError(
                f"{where} is not supported: it trains in {_WRAPPERS[kind]} a part of the patterns. Record a training "
                "in one process, of the plain module."
            )
        if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
            raise RefusedError(
                f"{where} is not supported: fully_shard divides its weights among several processes, of which each "
                "sees a part of the patterns; keys cannot be recorded either. Record a training in one process, of the "
                "plain module."
            )
    for path, parameter in model.named_parameters():
        if type(parameter).__name__ == "DTensor" or type(parameter.data).__name__ == "DTensor":
            raise RefusedError(
                f"Parameter {plain_name(path)!r} is a DTensor, whose elements are divided among several processes; "
                "that is not supported. Record a training in one process, of the plain module."
            )


def refuse_several_processes(layers: Sequence[Watched], world: World) -> None:
    """Refuse to record values where more processes train together than a recorder's world has.

    Keys alone are each process's own.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    count = torch.distributed.get_world_size()
    if count > world.size and not all(layer.keys_only for layer in layers):
        raise RefusedError(
            f"This is one of {count} processes of torch.distributed. Gradients are averaged over several processes, "
            "and the patterns of the others would be missing here. Record a training in one process, or keys only in a "
            'folder per process (layers={"*": "keys"}).'
        )
