"""How many tokens a language model takes, read from the model and its configuration; and its failures, named.

Nothing here changes or calls the model.
"""

import contextlib
import operator
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from dualform.errors import DualformError, QueryError

CONTEXT_NAMES = (
    "context",
    "block_size",
    "n_positions",
    "n_ctx",
    "max_position_embeddings",
    "max_seq_len",
    "max_seq_length",
    "context_length",
    "seq_length",
)
CONFIGURATIONS = ("config", "cfg", "hparams")
WRAPPED = ("_orig_mod", "module", "base_model", "model")  # where compiled, parallel, adapted and Lightning models lie


def context_of(model: nn.Module) -> int | None:
    """Return the number of tokens that a model takes at most, or None where neither it nor its configuration says.

    The attributes of the model come first, then its `config`, `cfg` or `hparams` (an object or a dictionary), then the
    same of the model that it wraps.

    >>> model = nn.Linear(2, 2)
    >>> model.config = {"block_size": 32}
    >>> context_of(model)
    32
    """
    waiting, seen = [model], set()
    while waiting:
        module = waiting.pop(0)
        if id(module) in seen:
            continue
        seen.add(id(module))
        configurations = [_get(module, name) for name in CONFIGURATIONS]
        texts = [_get(one, "text_config") for one in configurations]  # of a model of text and images
        for holder in (module, *configurations, *texts):
            for name in CONTEXT_NAMES:
                length = _whole(_get(holder, name))
                if length is not None:
                    return length
        waiting += [inner for name in WRAPPED if isinstance(inner := _get(module, name), nn.Module)]
    return None


def check_context(context: int | None) -> None:
    """Raise unless a context that somebody gave is a whole number of tokens, at least 1."""
    if context is not None and _whole(context) is None:
        raise QueryError(f"context is {context!r}; expected the number of tokens that the model takes, at least 1.")


@contextlib.contextmanager
def naming_failures(tokens: int) -> Iterator[None]:
    """Turn whatever the model raises on a prompt of so many tokens into a `QueryError` that says what to do."""
    try:
        yield
    except DualformError:
        raise
    except Exception as error:
        raise QueryError(
            f"The model failed on a prompt of {tokens} tokens: {type(error).__name__}: {error}. If that is more than "
            "the model takes, give its limit: context=... (--context on the command line)."
        ) from error


def _get(holder: Any, name: str) -> Any:
    if isinstance(holder, Mapping):
        return holder.get(name)
    try:
        return getattr(holder, name, None)
    except Exception:  # a property of somebody else's model
        return None


def _whole(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        length = operator.index(value)
    except TypeError:
        return None
    return length if length > 0 else None
