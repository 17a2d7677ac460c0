"""Which processes train a model together, and the ways of doing so that cannot be recorded.

A model that `DistributedDataParallel` wraps, or that `fully_shard` divides by rows, is recorded in all of its
processes, which are the recorder's world. Models that are divided in other ways, and replicas in one process, are
refused by name.
"""

from collections.abc import Collection, Sequence

import torch
from torch import nn

from dualform.errors import RefusedError
from dualform.recording.divided import group_of, refuse_divided
from dualform.recording.recorded_optimizers import RecordedOptimizer
from dualform.recording.watch import Watched, plain_name
from dualform.recording.world import OneProcess, World

_WRAPPERS = {
    "DataParallel": "it trains in several replicas, each of which sees a part of the patterns",
    "DistributedDataParallel": "it is a part of the model that is recorded",
    "FullyShardedDataParallel": "it divides all weights of a module as one flat vector, so that a "
    "process has a part of a row of one weight, and nothing of another; fully_shard, which follows it, divides by rows",
    "DeepSpeedEngine": "it divides weights, gradients or the optimizer's state among several processes",
}
_WRAPPED = "DistributedDataParallel"


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the module that `DistributedDataParallel` wraps; any other model as it is."""
    if type(model).__name__ == _WRAPPED and isinstance(inner := getattr(model, "module", None), nn.Module):
        return inner
    return model


def refuse_wrapped(model: nn.Module) -> None:
    """Refuse a model of which any part is trained by several replicas, or is divided among several processes.

    Args:
        model: the model, without the `DistributedDataParallel` around all of it.
    """
    for path, module in model.named_modules():
        kind, name = type(module).__name__, plain_name(path)
        where = f"{kind}{f' ({name!r})' if name else ''}"
        if kind in _WRAPPERS:
            raise RefusedError(
                f"{where} is not supported: {_WRAPPERS[kind]}. Record a training of the plain module in one process; "
                "or, in all of its processes, of a model that is wrapped as a whole by DistributedDataParallel, or "
                "divided by fully_shard."
            )
    refuse_divided(model)


def refuse_whole_matrix_steps(optimizers: Sequence[RecordedOptimizer], divided: Collection[str]) -> None:
    """Refuse an optimizer whose step of a matrix needs all of it, where processes have its rows."""
    for owned in optimizers:
        mine = [name for name in owned.parameters if name in divided]
        if mine and owned.kind is not None and owned.kind.needs_whole_matrix:
            raise RefusedError(
                f"Parameter {mine[0]!r} is divided by rows among several processes, and {owned.class_name} "
                "orthogonalises whole matrices; that is not supported. Train with SGD, AdamW or another optimizer that "
                "works element by element, or with DistributedDataParallel."
            )


def find_world(model: nn.Module, layers: Sequence[Watched]) -> World:
    """Return the processes that train a model together.

    They are the processes of the wrapper's group, or those among which `fully_shard` divides the model; of a plain
    module, all processes of torch.distributed: a framework may keep the wrapper to itself, and where gradients turn out
    not to be reduced, the first step is refused. A plain module of which only keys are recorded is each process's own.

    Args:
        model: the model as the user has it, wrapped or not.
        layers: its layers that are recorded.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return OneProcess()
    if (group := group_of(model)) is not None:
        from dualform.recording.process_group import ProcessGroup  # which needs torch.distributed

        return ProcessGroup(group)
    wrapped = unwrap_model(model) is not model
    if not wrapped and all(layer.keys_only for layer in layers):
        return OneProcess()
    group = getattr(model, "process_group", None) if wrapped else None
    if torch.distributed.get_world_size(group) == 1:
        return OneProcess()
    from dualform.recording.process_group import ProcessGroup  # which needs torch.distributed

    return ProcessGroup(group)


def refuse_some_of_all(world: World) -> None:
    """Refuse to keep steps where only some of the processes of torch.distributed train together.

    A replay needs all processes that trained, and has those of torch.distributed.
    """
    if world.size > 1 and (here := torch.distributed.get_world_size()) != world.size:
        raise RefusedError(
            f"keep=Steps() is for trainings of all processes of torch.distributed: {world.size} of {here} train "
            f"together here. Start {world.size} processes alone, or keep patterns or shares."
        )


def rounds_reduced(model: nn.Module) -> bool:
    """Say whether a communication hook of `DistributedDataParallel` may round the gradients that are reduced."""
    return bool(getattr(model, "_comm_hooks", ()))


def refuse_several_processes(framework: str) -> None:
    """Refuse a framework's training in several processes, whose data loading is not followed there yet."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        count = torch.distributed.get_world_size()
        if count > 1:
            raise RefusedError(
                f"This is one of {count} processes that {framework} trains in, which its recorder does not support. "
                "Record a training in one process; or in a loop of your own, by dualform.record in every process."
            )


def is_first_process() -> bool:
    """Say whether this is the first of all processes of torch.distributed, or the only one."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return True
    return torch.distributed.get_rank() == 0
