"""Path contributions that are kept in the cache of their run, by the question and by the model that is asked.

A path takes minutes where a training took minutes, and the same question is asked again: by the viewer, by a report, by
the next process. A quantity that is a function of the user's has no name that would say what it computes, so that
contributions to it are not kept; nor are those of inputs that cannot be read as numbers and texts. A model is known by
its state, its modules' attributes and the code of their classes; functions outside of it that it calls are not looked
at.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from dualform.attend.path import Asked, PathContributions
from dualform.binning import Bins
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
    try:
        for piece in _pieces((asked.batches, asked.targets, others, options)):
            digest.update(piece)
    except _UnreadableError:
        return None
    for text in _model_texts(asked.model):
        digest.update(text.encode())
    return "path", quantity, horizon, repr(asked.model), digest.hexdigest()


class _UnreadableError(Exception):
    """A part of a question has a content that nobody can read."""


def _model_texts(model: nn.Module) -> Iterator[str]:
    """Yield what tells a model from another that is printed alike: its modules' attributes, and their classes' code."""
    told: set[int] = {id(model)}
    for module in model.modules():
        yield from _object_texts(module, told)
    for kind in dict.fromkeys(base for module in model.modules() for base in type(module).__mro__):
        if kind.__module__.partition(".")[0] not in ("torch", "builtins"):
            for name, entry in vars(kind).items():
                function = getattr(entry, "fget", getattr(entry, "__func__", entry))
                if isinstance(function, FunctionType):
                    yield f"{kind.__qualname__}.{name} {_code_text(function.__code__)};"


def _object_texts(thing: Any, told: set[int]) -> Iterator[str]:
    """Yield an object's class and its public attributes; those of objects that cannot be printed in the same way.

    Args:
        thing: the object.
        told: the ids of the objects that were or are being told, which grows.
    """
    yield f"{type(thing).__module__}.{type(thing).__qualname__}:"
    for name, value in getattr(thing, "__dict__", {}).items():
        if name.startswith("_") or name == "training" or isinstance(value, nn.Module):
            continue
        yield f"{name}="
        try:
            yield "".join(piece.hex() for piece in _pieces(value))
        except _UnreadableError:
            if isinstance(value, FunctionType):
                yield _code_text(value.__code__)
            elif " at 0x" not in (text := repr(value)):
                yield text
            elif id(value) not in told:
                told.add(id(value))
                yield from _object_texts(value, told)


def _code_text(code: CodeType) -> str:
    """Return what a function computes, with the functions inside of it."""
    constants = [_code_text(one) if isinstance(one, CodeType) else repr(one) for one in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def find_kept(cache: AnswerCache | None, name: tuple[Any, ...] | None) -> PathContributions | None:
    """Return the path contributions that are kept under a name; None where there are none."""
    found = None if name is None or cache is None else cache.find(name)
    return None if found is None else from_tensors(found)


def keep_path(cache: AnswerCache | None, name: tuple[Any, ...] | None, answer: PathContributions) -> PathContributions:
    """Keep path contributions under a name, where they have one and their groups can be written down; return them."""
    if name is not None and cache is not None:
        try:
            cache.keep(name, as_tensors(answer))
        except (TypeError, ValueError):  # groups that are dates, for example
            return answer
    return answer


def as_tensors(answer: PathContributions, *, allow_nan: bool = False) -> dict[str, Tensor]:
    """Return path contributions as tensors by name; groups that are no numbers or texts raise `TypeError`.

    Args:
        answer: the path contributions.
        allow_nan: whether a group may be NaN, which is equal to no group of another question; else `ValueError`.
    """
    fields = {field.name: getattr(answer, field.name) for field in dataclasses.fields(answer)}
    tensors = {key: value for key, value in fields.items() if isinstance(value, Tensor)}
    words = json.dumps({key: value for key, value in fields.items() if key not in tensors}, allow_nan=allow_nan)
    return {**tensors, WORDS: torch.tensor(list(words.encode()), dtype=torch.uint8)}


def from_tensors(found: Mapping[str, Tensor]) -> PathContributions:
    """Return the path contributions that `as_tensors` wrote down."""
    fields: dict[str, Any] = dict(found)
    words = json.loads(bytes(fields.pop(WORDS).tolist()))
    return PathContributions(**fields, **{key: _as_tuples(value) for key, value in words.items()})


def _quantity_name(quantity: Quantity) -> str | None:
    """Return the name of a quantity that says all of what it computes; None for a function of the user's."""
    if isinstance(quantity, str):
        return quantity
    if isinstance(quantity, Contrast):
        return quantity.__name__
    return None


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield plain_name(name), tensor


def _pieces(value: Any) -> Iterator[bytes]:
    """Yield the content of a question as bytes: tensors by their values, containers by theirs, plain values as text."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        yield f"{value.dtype} {value.shape};".encode()
        yield value.tobytes()
    elif isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_nested or value.is_quantized:
            raise _UnreadableError
        yield f"{value.dtype} {tuple(value.shape)};".encode()
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        yield from _pieces([part for item in value.items() for part in item])
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        yield f"{len(value)}[".encode()
        for one in value:
            yield from _pieces(one)
    elif value is None or isinstance(value, str | bytes | int | float | complex | np.generic | Bins | torch.dtype):
        yield f"{value!r};".encode()
    else:
        raise _UnreadableError


def _as_tuples(value: Any) -> Any:
    """Return a value that was read from JSON, with tuples in place of lists, as answers have them."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
