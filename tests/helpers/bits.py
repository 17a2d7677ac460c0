"""Answers as bytes, to compare them to the bit."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor


def bits(found: Any) -> Any:
    """Return an answer with every tensor as its dtype, shape and bytes; two are equal only if they are to the bit."""
    if isinstance(found, Tensor):
        return str(found.dtype), tuple(found.shape), found.contiguous().numpy().tobytes()
    if isinstance(found, np.ndarray):
        return str(found.dtype), found.shape, found.tobytes()
    if isinstance(found, Mapping):
        return {str(name): bits(value) for name, value in found.items()}
    if isinstance(found, list | tuple):
        return [bits(each) for each in found]
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        return {field.name: bits(getattr(found, field.name)) for field in dataclasses.fields(found)}
    return repr(found)
