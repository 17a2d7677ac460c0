"""Make a user's model from `package.module:factory`, and find inputs for it.

A factory that the user names is imported and called, as servers take an application. One that a run remembers is the
word of whoever made the run: calling it runs code of their choice, so it is called only where it is one of our own
models, or where the user trusts the run (docs/security.md).
"""

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dualform.attend.memory import Memory, unknown_text
from dualform.errors import DualformError, QueryError
from dualform.printable import printable


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
    module_name, attribute = _parts(spec)
    own = module_name == OWN_MODELS or module_name.startswith(f"{OWN_MODELS}.")
    if not own and not trust and not _is_agreed(memory, spec, arguments):
        raise QueryError(
            f"{memory.location} says that its model is made by calling {_call(spec, arguments)}, which runs code that "
            "the run names. If you trust whoever made the run, pass --trust; or name a factory of your own: --model "
            "package.module:factory."
        )
    with _without_current_folder():
        factory = _imported(module_name, attribute, spec)
    home = str(getattr(factory, "__module__", ""))
    plain = inspect.isfunction(factory) or (inspect.isclass(factory) and issubclass(factory, nn.Module))
    if not plain or not (home == module_name or home.startswith(f"{module_name}.")):
        raise QueryError(
            f"{memory.location} names {spec} as what makes its model; expected a function, or a class of modules, that "
            f"is defined in {module_name}. Name a factory yourself: --model package.module:factory."
        )
    try:
        return _made(factory, arguments, spec)
    except DualformError:
        raise
    except Exception as error:
        raise QueryError(
            f"{memory.location} says that its model is made by calling {_call(spec, arguments)}, which failed: "
            f"{type(error).__name__}: {error}. Name a factory yourself: --model package.module:factory."
        ) from error


def make_model(spec: str) -> nn.Module:
    """Import the factory that the user names, also from the current folder, and call it."""
    module_name, attribute = _parts(spec)
    sys.path.insert(0, "")
    try:
        factory = _imported(module_name, attribute, spec)
    finally:
        sys.path.remove("")
    return _made(factory, MappingProxyType({}), spec)


def _parts(spec: str) -> tuple[str, str]:
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute:
        raise QueryError(f"--model is {spec!r}; expected package.module:factory.")
    return module_name, attribute


def _imported(module_name: str, attribute: str, spec: str) -> Any:
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise QueryError(f"--model {spec} cannot be imported: {error}.") from error


def _made(factory: Any, arguments: Mapping[str, Any], spec: str) -> nn.Module:
    model = factory(**arguments) if callable(factory) and not isinstance(factory, nn.Module) else factory
    if not isinstance(model, nn.Module):
        raise QueryError(f"--model {spec} made a {type(model).__name__}; expected an nn.Module.")
    return model


def _call(spec: str, arguments: Mapping[str, Any]) -> str:
    """Return a call as people read it, without control characters that a terminal would obey."""
    listed = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return printable(f"{spec}({listed})"[:500])


def _is_agreed(memory: Memory, spec: str, arguments: Mapping[str, Any]) -> bool:
    """Ask on a terminal whether to call the factory that the run names; without a terminal the answer is no."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    sys.stderr.write(
        f"{printable(memory.location)} says that its model is made by calling\n  {_call(spec, arguments)}\n"
        "This runs code that the run names. Do you trust whoever made the run? [y/N] "
    )
    sys.stderr.flush()
    return sys.stdin.readline().strip().casefold() in ("y", "yes")


@contextlib.contextmanager
def _without_current_folder() -> Iterator[None]:
    """Leave the current folder out of the import path: a file there is not what the run's maker meant."""
    before = list(sys.path)
    here = os.path.realpath(".")
    sys.path[:] = [entry for entry in before if entry and os.path.realpath(entry) != here]
    try:
        yield
    finally:
        sys.path[:] = before


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
