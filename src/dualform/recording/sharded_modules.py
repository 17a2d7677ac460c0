"""Modules to which `torch.distributed.fsdp.fully_shard` has given a class of its own, and plain copies of them."""

import copy
from collections import OrderedDict
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from dualform.recording.module_copies import deep_copy

M = TypeVar("M", bound=nn.Module)
_SHARDED = "FSDPModule"  # the class that comes between a module's own class and its new one
_STATE = "__composable_api_state_key"  # how attributes begin in which `fully_shard` keeps what it knows of a module


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


def is_divided(tensor: Any) -> bool:
    """Say whether the elements of a tensor are divided among processes."""
    return type(tensor).__name__ == "DTensor" or type(getattr(tensor, "data", None)).__name__ == "DTensor"


def own_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor that is divided among processes; any other tensor as it is."""
    return cast("Tensor", cast("Any", tensor).to_local()).detach() if is_divided(tensor) else tensor


def plain_copy(model: M, memo: dict[int, Any] | None = None) -> M:
    """Return a deep copy of a module, for a trial; of one that is divided among processes, with whole parameters.

    Rows that other processes have are drawn at random in the copy, as this process's rows are distributed: they come
    over no network, since not every process need make a trial at the same time.

    Args:
        model: the module.
        memo: takes the copy of each module inside, and of other objects, by the original's id.
    """
    memo = {} if memo is None else memo
    for parameter in model.parameters():
        if is_divided(parameter):
            memo[id(parameter)] = nn.Parameter(_filled(parameter), requires_grad=parameter.requires_grad)
    sharded = [module for module in model.modules() if is_sharded_module(module)]
    for module in sharded:
        kind = original_type(module)
        memo[id(module)] = kind.__new__(kind)
        hooks = (value for name, value in vars(module).items() if name.endswith("_hooks") or "_hooks_" in name)
        memo.update({id(value): OrderedDict() for value in hooks})
    for module in sharded:
        kept = {name: value for name, value in vars(module).items() if not name.startswith(_STATE)}
        vars(memo[id(module)]).update({name: copy.deepcopy(value, memo) for name, value in kept.items()})
    return deep_copy(model, memo)


def _filled(parameter: nn.Parameter) -> Tensor:
    """Return numbers like those of a divided parameter, with as many rows as it has in all processes."""
    rows = own_part(parameter)
    if not len(rows):
        return torch.zeros(parameter.shape, dtype=rows.dtype, device=rows.device)
    generator = torch.Generator().manual_seed(0)
    found = rows.mean() + rows.std(correction=0) * torch.randn(parameter.shape, generator=generator).to(rows)
    found[: len(rows)] = rows
    return found
