"""Path contributions that are kept in the cache of their run, by everything that they depend on.

A path takes minutes where a training took minutes, and the same question is asked again: by the viewer, by a report, by
the next process. A quantity that is a function of the user's has no name that would say what it computes, so that
contributions to it are not kept.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from dualform.attend.path import Asked, PathContributions
from dualform.effects.output_gradients import Contrast, Quantity
from dualform.engine.answer_cache import AnswerCache
from dualform.recording.watch import plain_name

WORDS = "words"
"""Name of the tensor that holds, as JSON, all fields of an answer that are no tensors."""


def name_path(asked: Asked, horizon: int, covered: Mapping[str, Any], **options: Any) -> tuple[Any, ...] | None:
    """Return a name that two questions share only if they ask the same; None where the quantity has no name.

    Args:
        asked: the model, its inputs and the quantity.
        horizon: how many steps the path has.
        covered: the recorded parameters, whose values along the path are the run's and not the model's.
        options: all else that the answer depends on; tensors count by their content.
    """
    quantity = _quantity_name(asked.quantity)
    if quantity is None:
        return None
    digest = xxhash.xxh3_128()
    own_answer = asked.targets is None and isinstance(asked.quantity, str)  # then the model's weights say the targets
    others = {name: tensor for name, tensor in _state(asked.model) if own_answer or name not in covered}
    for piece in _pieces((asked.batches, asked.targets, others, options, _forward_code(asked.model))):
        digest.update(piece)
    return "path", quantity, horizon, repr(asked.model), digest.hexdigest()


def _forward_code(model: nn.Module) -> list[str]:
    """Return what tells a model from another that is printed alike: its classes and their forward functions."""
    found = []
    for module in model.modules():
        code = getattr(type(module).forward, "__code__", None)
        found.append(f"{type(module).__module__}.{type(module).__qualname__}")
        if code is not None:
            constants = [one for one in code.co_consts if not hasattr(one, "co_code")]
            found.append(f"{code.co_code.hex()} {code.co_names} {constants}")
    return found


def find_kept(cache: AnswerCache | None, name: tuple[Any, ...] | None) -> PathContributions | None:
    """Return the path contributions that are kept under a name; None where there are none."""
    found = None if name is None or cache is None else cache.find(name)
    if found is None:
        return None
    fields: dict[str, Any] = dict(found)
    words = json.loads(bytes(fields.pop(WORDS).tolist()))
    return PathContributions(**fields, **{key: _as_tuples(value) for key, value in words.items()})


def keep_path(cache: AnswerCache | None, name: tuple[Any, ...] | None, answer: PathContributions) -> PathContributions:
    """Keep path contributions under a name, where they have one and their groups can be written down; return them."""
    if name is None or cache is None:
        return answer
    fields = {field.name: getattr(answer, field.name) for field in dataclasses.fields(answer)}
    tensors = {key: value for key, value in fields.items() if isinstance(value, Tensor)}
    try:
        words = json.dumps({key: value for key, value in fields.items() if key not in tensors}, allow_nan=False)
    except (TypeError, ValueError):  # groups that are dates, for example
        return answer
    cache.keep(name, {**tensors, WORDS: torch.tensor(list(words.encode()), dtype=torch.uint8)})
    return answer


def _quantity_name(quantity: Quantity) -> str | None:
    """Return the name of a quantity that says all of what it computes; None for a function of the user's."""
    if isinstance(quantity, str):
        return quantity
    if isinstance(quantity, Contrast):
        return quantity.__name__
    return repr(quantity) if dataclasses.is_dataclass(quantity) else None


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield plain_name(name), tensor


def _pieces(value: Any) -> Iterator[bytes]:
    """Yield the content of a question as bytes: tensors by their values, containers by theirs, the rest by its repr."""
    if isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)};".encode()
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        yield from _pieces([part for item in value.items() for part in item])
    elif isinstance(value, Sequence) and not isinstance(value, str):
        yield f"{len(value)}[".encode()
        for one in value:
            yield from _pieces(one)
    else:
        yield f"{value!r};".encode()


def _as_tuples(value: Any) -> Any:
    """Return a value that was read from JSON, with tuples in place of lists, as answers have them."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
