"""Make a user's model from `package.module:factory`, and find inputs for it.

A factory that the user names is imported and called. One that a run remembers is called only where it is one of our own
models, or where the user trusts the run (`dualform.named_code`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dualform.attend.memory import Memory, unknown_text
from dualform.errors import DualformError, QueryError
from dualform.named_code import RememberedFunction, import_named


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A model as the recording left it.

    Attributes:
        model: the model.
        warnings: sentences for every answer about the model: which of its parts have the factory's values.
    """

    model: nn.Module
    warnings: tuple[str, ...] = ()


def load_model(memory: Memory, spec: str | None, *, accept_untrained: bool = False, trust: bool = False) -> Loaded:
    """Make the model and load the values that the memory keeps: recorded weights, other parameters and buffers.

    Args:
        memory: the memory.
        spec: `package.module:factory`; by default the one that the run remembers.
        accept_untrained: answer with the factory's own values for what the run does not keep, instead of refusing.
        trust: call the factory that the run remembers, wherever it is defined.
    """
    if spec is not None:
        model = make_model(spec)
    elif memory.factory is not None:
        spec, arguments = memory.factory
        model = make_remembered(memory, spec, arguments, trust=trust)
    else:
        raise QueryError(
            f"{memory.location} does not know its model. Say how to make it: --model package.module:factory."
        )
    trained, doubts = memory.restored(model)
    if not doubts:
        return Loaded(trained)
    if not accept_untrained:
        raise QueryError(
            f"{unknown_text(doubts)} An answer would be about another network. Let {spec} load your checkpoint, or "
            "accept its own values for them with --accept-untrained."
        )
    return Loaded(trained, (f"WARNING: {unknown_text(doubts)} They are as {spec} made them.",))


OWN_MODELS = "dualform.experiments.models"
"""The package whose factories a run may name without being trusted: they make networks of their arguments."""


def make_remembered(memory: Memory, spec: str, arguments: Mapping[str, Any], *, trust: bool) -> nn.Module:
    """Make a model as the run says, if it may be believed: one of our own, or the user trusts the run."""
    remembered = RememberedFunction(
        memory.location,
        spec,
        "its model is made",
        "pass --trust",
        "name a factory of your own: --model package.module:factory",
        arguments,
        free=OWN_MODELS,
        kind=nn.Module,
    )
    factory = remembered.load(trust=trust)
    try:
        return _made(factory, arguments, spec)
    except DualformError:
        raise
    except Exception as error:
        raise QueryError(
            f"{memory.location} says that its model is made by calling {remembered.call}, which failed: "
            f"{type(error).__name__}: {error}. Name a factory yourself: --model package.module:factory."
        ) from error


def make_model(spec: str) -> nn.Module:
    """Import the factory that the user names, also from the current folder, and call it."""
    return _made(import_named(spec, option="--model", kind="factory"), MappingProxyType({}), spec)


def _made(factory: Any, arguments: Mapping[str, Any], spec: str) -> nn.Module:
    model = factory(**arguments) if callable(factory) and not isinstance(factory, nn.Module) else factory
    if not isinstance(model, nn.Module):
        raise QueryError(f"--model {spec} made a {type(model).__name__}; expected an nn.Module.")
    return model


def load_inputs(memory: Memory, path: Path | None) -> tuple[Tensor, Tensor | None]:
    """Return inputs and, if they are known, targets: from a file, or the tests that the run keeps."""
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
