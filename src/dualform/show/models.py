"""Make a user's model from `package.module:factory`, as servers take an application, and find inputs for it."""

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dualform.attend.memory import Memory, unknown_text
from dualform.errors import QueryError


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A model as the recording left it.

    Attributes:
        model: the model.
        warnings: sentences that belong into every answer about it: which parts are as the factory made them.
    """

    model: nn.Module
    warnings: tuple[str, ...] = ()


def load_model(memory: Memory, spec: str | None, *, accept_untrained: bool = False) -> Loaded:
    """Make the model and put what the memory keeps into it: recorded weights, other parameters and buffers.

    Args:
        memory: the memory.
        spec: `package.module:factory`; by default the one that the run remembers.
        accept_untrained: answer with the factory's own values for what the run does not keep, instead of refusing.
    """
    arguments: Mapping[str, Any] = {}
    if spec is None:
        if memory.factory is None:
            raise QueryError(
                f"{memory.path} does not know its model. Say how to make it: --model package.module:factory."
            )
        spec, arguments = memory.factory
    model = make_model(spec, arguments)
    trained, doubts = memory.restored(model)
    if not doubts:
        return Loaded(trained)
    if not accept_untrained:
        raise QueryError(
            f"{unknown_text(doubts)} An answer would be about another network. Let {spec} load your checkpoint, or "
            "accept its own values for them with --accept-untrained."
        )
    return Loaded(trained, (f"WARNING: {unknown_text(doubts)} They are as {spec} made them.",))


def make_model(spec: str, arguments: Mapping[str, Any] = MappingProxyType({})) -> nn.Module:
    """Import a factory and call it."""
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute:
        raise QueryError(f"--model is {spec!r}; expected package.module:factory.")
    sys.path.insert(0, "")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise QueryError(f"--model {spec} cannot be imported: {error}.") from error
    finally:
        sys.path.remove("")
    model = factory(**arguments) if callable(factory) and not isinstance(factory, nn.Module) else factory
    if not isinstance(model, nn.Module):
        raise QueryError(f"--model {spec} made a {type(model).__name__}; expected an nn.Module.")
    return model


def load_inputs(memory: Memory, path: Path | None) -> tuple[Tensor, Tensor | None]:
    """Return inputs and, where they are known, targets: from a file, or those that the run keeps."""
    if path is None:
        return memory.tests()
    if not path.is_file():
        raise QueryError(f"{path} is not a file. Give a .npy array, or a .safetensors file with inputs (and targets).")
    if path.suffix == ".npy":
        return torch.from_numpy(np.load(path, allow_pickle=False)), None
    if path.suffix == ".safetensors":
        import safetensors.torch

        tensors = safetensors.torch.load_file(path)
        if "inputs" not in tensors:
            raise QueryError(f"{path} holds {', '.join(tensors) or 'nothing'}; expected a tensor named 'inputs'.")
        return tensors["inputs"], tensors.get("targets")
    raise QueryError(f"{path} is a {path.suffix or 'nameless'} file; expected .npy or .safetensors.")
