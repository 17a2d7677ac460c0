"""Arguments and outputs of a forward: the tensors inside nested tuples, lists and mappings."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def input_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return every tensor among a forward's arguments, nested ones included."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
        return [args[0]]
    return list(tensors_in((tuple(args), dict(kwargs))))


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a nested value with every tensor changed; what is no tensor, mapping, list or tuple stays."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        changed = {key: mapped(part, change) for key, part in value.items()}
        return changed if type(value) is dict else _like(value, changed)
    if isinstance(value, tuple | list):
        parts = [mapped(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _like(value: Any, changed: dict[Any, Any]) -> Any:
    other = copy.copy(value)
    for key, part in changed.items():
        other[key] = part
    return other


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor of a nested value, in the order in which `mapped` visits them."""
    return (leaf for leaf in leaves(value) if isinstance(leaf, Tensor))


def leaves(value: Any) -> Iterator[Any]:
    """Yield every part of a nested value that is no mapping, list or tuple."""
    if isinstance(value, Tensor | PackedSequence):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from leaves(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from leaves(part)
    else:
        yield value
