"""The part of a model's state that no recorded layer covers: other parameters, trained or frozen, and all buffers.

A reader that makes the model anew needs these values too, or its answers describe a half-trained network. Here they are
found in the live model; what is kept of them, and where, is decided elsewhere (`dualform.store.kept_state`).
"""

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from dualform.recording.sharded_modules import is_divided, own_part, reshard
from dualform.recording.watch import plain_name

StateKind = Literal["trained", "frozen", "buffer", "extra"]


@dataclass(frozen=True, slots=True, eq=False)
class StatePart:
    """One uncovered part of a model's state.

    Attributes:
        kind: a trained parameter, a frozen one, a buffer, or the extra state that a module defines for itself.
        tensor: the live tensor; None where there is none that can be read.
        reason: why it cannot be read; empty where it can.
        divided: whether the tensor has only those rows of the part that this process has.
    """

    kind: StateKind
    tensor: Tensor | None
    reason: str = ""
    divided: bool = False


class UncoveredState:
    """Finds the uncovered state of a model as it is when asked. Holds neither the model nor its optimizers alive."""

    def __init__(self, model: nn.Module, optimizers: Iterable[Optimizer], covered: Iterable[str]) -> None:
        self._model = weakref.ref(model)
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._covered = frozenset(covered)
        self._ever_trained: set[str] = set()  # a parameter may be trained for a while and frozen afterwards

    def parts(self, *, extra: bool = True) -> dict[str, StatePart] | None:
        """Return every uncovered part by its plain name, each tensor once; None where the model is gone.

        With `extra` modules are asked whether they have extra state, which runs the user's code.
        """
        model = self._model()
        if model is None:
            return None
        reshard(model)
        held = {id(parameter): name for name, parameter in self._held()}
        found: dict[str, StatePart] = {}
        for path, parameter in model.named_parameters():
            name = plain_name(path)
            trained = held.pop(id(parameter), None) is not None and parameter.requires_grad
            if name not in self._covered:
                if trained:
                    self._ever_trained.add(name)
                found[name] = _part("trained" if name in self._ever_trained else "frozen", parameter)
        for path, buffer in model.named_buffers():
            found[plain_name(path)] = _part("buffer", buffer)
        for name in held.values():  # a layer that is not registered, or a parameter of something else
            found[name] = StatePart("trained", None, "is held by the optimizer but is no part of the model")
        return found | _extra_states(model) if extra else found

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter that an optimizer trains, with a name that says where it is held."""
        for i, reference in enumerate(self._optimizers):
            optimizer = reference()
            for j, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
                for k, parameter in enumerate(group["params"]):
                    if parameter.requires_grad:
                        yield f"<optimizer {i}, group {j}, parameter {k}>", parameter


def live_state(model: nn.Module, covered: Iterable[str]) -> dict[str, StatePart]:
    """Return the uncovered state of a model whose optimizers are not known, so that no parameter counts as trained."""
    found = UncoveredState(model, (), covered).parts()
    assert found is not None, "the model is held by the caller"
    return found


def _part(kind: StateKind, tensor: Tensor) -> StatePart:
    divided = is_divided(tensor)
    try:
        tensor = own_part(tensor)
        reason = _unreadable(tensor)
    except Exception as error:  # a tensor of some library's own kind, which may refuse any question
        reason = f"cannot be read ({type(error).__name__}: {error})"
    return StatePart(kind, None if reason else tensor, reason, divided)


def _unreadable(tensor: Tensor) -> str:
    """Say why a tensor has no plain bytes of its own; nothing where it has."""
    if is_lazy(tensor):
        return "is not initialised"
    plain = tensor.detach()
    if type(plain) is not Tensor:
        return f"is a {type(plain).__name__}"
    if plain.is_meta:
        return "is on the meta device"
    if plain.layout is not torch.strided:
        return "is sparse"
    return "is quantized" if plain.is_quantized else ""


def _extra_states(model: nn.Module) -> dict[str, StatePart]:
    """Return the modules that define a state beside parameters and buffers, which is of any type and is not kept."""
    found = {}
    for path, module in model.named_modules():
        own = getattr(type(module), "get_extra_state", nn.Module.get_extra_state)
        if own is nn.Module.get_extra_state or isinstance(module, torch.jit.ScriptModule):
            continue
        try:
            empty = module.get_extra_state() is None
        except Exception:  # the user's code, which need not expect to be asked now
            empty = False
        if not empty:
            name = ".".join(filter(None, (plain_name(path), "_extra_state")))
            found[name] = StatePart("extra", None, f"is extra state of a {type(module).__name__}")
    return found
