"""Modules to which `torch.distributed.fsdp.fully_shard` has given a class of its own."""

from typing import Any, cast

from torch import nn

_SHARDED = "FSDPModule"  # the class that comes between a module's own class and its new one


def is_sharded_module(module: nn.Module) -> bool:
    """Say whether `fully_shard` was called on a module."""
    return any(base.__name__ == _SHARDED for base in type(module).__mro__)


def original_type(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module; the one it had before `fully_shard` gave it another."""
    bases = type(module).__mro__
    return cast("type[nn.Module]", bases[2]) if bases[1].__name__ == _SHARDED else type(module)


def reshard(model: nn.Module) -> None:
    """Let every module have its divided parameters in place, as they are between a step and a forward.

    After a forward without a backward, such as an evaluation, the outermost module still has parameters with all rows.
    """
    for module in model.modules():
        if is_sharded_module(module):
            cast("Any", module).reshard()
