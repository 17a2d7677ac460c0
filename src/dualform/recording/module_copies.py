"""Deep copies of modules, made with less Python than `copy.deepcopy`, which takes longer than a small model's forward.

A module's attributes are mostly empty dictionaries of hooks, numbers and parameters. These are copied here; any other
attribute, and any module that says itself how it is copied, is left to `copy.deepcopy`. The copy is the same.
"""

import copy
import copyreg
from collections import OrderedDict
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeVar, cast

from torch import nn

M = TypeVar("M", bound=nn.Module)
_SHARED = frozenset([type(None), bool, int, float, complex, str, bytes, type, FunctionType, BuiltinFunctionType])
"""Types of objects that a copy shares with the original, as with `copy.deepcopy`."""
_CONTAINERS: dict[type, Callable[[], Any]] = {dict: dict, OrderedDict: OrderedDict, set: set, list: list}


def deep_copy(module: M, memo: dict[int, Any]) -> M:
    """Return what `copy.deepcopy(module, memo)` returns.

    Args:
        module: the module.
        memo: copies by the id of their original, as `copy.deepcopy` takes and fills it. The originals of all its
            entries have to be alive for as long as it is used.
    """
    if id(module) in memo:
        return cast("M", memo[id(module)])
    state: Any = cast("Any", module).__getstate__() if _is_copied_plainly(module) else None
    if type(state) is not dict:
        return copy.deepcopy(module, memo)
    made: Any = type(module).__new__(type(module))
    memo[id(module)] = made
    made.__setstate__({name: _copied_attribute(value, memo) for name, value in state.items()})
    return cast("M", made)


def _is_copied_plainly(module: nn.Module) -> bool:
    """Say whether `copy.deepcopy` would make an object of the module's class, and give it copies of all attributes."""
    kind = type(module)
    return (
        kind.__new__ is object.__new__
        and kind.__reduce__ is object.__reduce__
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind not in copyreg.dispatch_table
        and "__reduce_ex__" not in vars(module)
        and not any(hasattr(module, name) for name in ("__deepcopy__", "__getnewargs__", "__getnewargs_ex__"))
    )


def _copied_attribute(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy of a module's attribute."""
    kind = type(value)
    if kind in _SHARED:
        return value
    if isinstance(value, nn.Module):
        return deep_copy(value, memo)
    if kind is nn.Parameter:
        return value.__deepcopy__(memo)
    if kind is OrderedDict and vars(value):
        return copy.deepcopy(value, memo)  # its attributes say how it is copied
    if kind in _CONTAINERS and (not value or kind is dict) and id(value) not in memo:
        made = memo[id(value)] = _CONTAINERS[kind]()
        if value:
            for key, part in value.items():
                made[key if type(key) is str else copy.deepcopy(key, memo)] = _copied_attribute(part, memo)
        return made
    return copy.deepcopy(value, memo)
