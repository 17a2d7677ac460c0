"""Which facts of an optimizer's step are logged, one registered class per optimizer.

Looked up by exact type: a subclass may do anything (AdamW is an Adam), unless it evidently changes nothing that a step
uses. Nothing here derives coefficients.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from dualform.errors import RefusedError
from dualform.identity.families import kinds
from dualform.identity.families.replayed import Kind, Setting


class FactLogger(ABC):
    """Reads the settings that one step applies to one parameter."""

    rounds = False  # whether the optimizer itself rounds more coarsely than the parameter's dtype
    logs_restart = False  # whether the settings say that the state was cleared, so that the step is exact all the same

    @abstractmethod
    def settings(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Setting]:
        """Return the settings, before the step."""

    @abstractmethod
    def state(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return what of the optimizer's state is part of the start, where it is warm already."""

    @abstractmethod
    def check_skipped(self, settings: Mapping[str, Setting], parameter: str) -> None:
        """Raise where a fused step that a gradient scaler skips would leave a broken state behind."""


L = TypeVar("L", bound=FactLogger)
_LOGGERS: dict[type[Optimizer], FactLogger] = {}


def logs(optimizer_type: type[Optimizer]) -> Callable[[type[L]], type[L]]:
    """Register a logger for an optimizer type."""

    def register(logger: type[L]) -> type[L]:
        _LOGGERS[optimizer_type] = logger()
        return logger

    return register


def supported() -> tuple[str, ...]:
    """Return the names of the optimizers whose steps can be recorded exactly."""
    return tuple(sorted(optimizer_type.__name__ for optimizer_type in _LOGGERS))


_OF_A_CLASS = frozenset(
    [
        "__module__",
        "__doc__",
        "__qualname__",
        "__dict__",
        "__weakref__",
        "__slots__",
        "__annotations__",
        "__annotate__",
        "__annotate_func__",
        "__annotations_cache__",
        "__type_params__",
        "__orig_bases__",
        "__parameters__",
        "__firstlineno__",
        "__static_attributes__",
        "__abstractmethods__",
        "_abc_impl",
        "__init__",
        "__repr__",
        "__str__",
    ]
)
"""Names that a subclass may have without changing what a step does: settings are read at every step."""
_READ_BY_STEPS = frozenset(["__getattr__", "_step_supports_amp_scaling", "grad_scale", "found_inf"])
"""Names that a step, or a gradient scaler, looks for though the base class need not have them."""


def base_optimizer(kind: type[Optimizer]) -> type[Optimizer] | None:
    """Return the known optimizer type that a type is or derives from, whatever it does; AdamW for AdamW."""
    return next((base for base in kind.__mro__ if base in _LOGGERS), None)


def changed_names(kind: type[Optimizer], base: type[Optimizer]) -> list[str]:
    """Return what a subclass defines that the base's step may use or be reached through; nothing for the base itself.

    The evidence is by identity: a name that the base has (and so its step may use) must still mean the same object.
    """
    changed = []
    for part in kind.__mro__:
        if part in base.__mro__:
            continue
        for name, value in vars(part).items():
            if name in _OF_A_CLASS or (name not in _READ_BY_STEPS and not hasattr(base, name)):
                continue
            if name != "step" or _unhooked(value) is not _unhooked(base.step):
                changed.append(name)
    return changed


def _unhooked(step: Any) -> Any:
    """Return a step without the wrapper that torch puts around it when an optimizer is made, to call step hooks."""
    while getattr(step, "__code__", None) in _HOOKING:
        step = step.__wrapped__
    return step


_HOOKING = [constant for constant in Optimizer.profile_hook_step.__code__.co_consts if isinstance(constant, CodeType)]


def known_type(optimizer: Optimizer) -> type[Optimizer] | None:
    """Return the known type whose step an optimizer's step is: its own, or that of a base it changes nothing of."""
    kind = type(optimizer)
    if kind in _LOGGERS:
        return kind
    base = base_optimizer(kind)
    return base if base is not None and not changed_names(kind, base) else None


def find_logger(optimizer: Optimizer) -> FactLogger | None:
    """Return the logger for an optimizer whose step is known, or nothing."""
    kind = known_type(optimizer)
    return None if kind is None else _LOGGERS[kind]


def require_logger(optimizer: Optimizer) -> FactLogger:
    """Return the logger for an optimizer whose step is known, or refuse by name."""
    logger = find_logger(optimizer)
    if logger is None:
        kind = type(optimizer)
        base = base_optimizer(kind)
        changed = "" if base is None else f" (it derives from {base.__name__} and has its own {_listed(kind, base)})"
        raise RefusedError(
            f"{kind.__name__} is not an optimizer whose coefficients are known{changed}; supported: "
            f'{", ".join(supported())}. Record keys only (layers={{"*": "keys"}}) to have attention without '
            "reconstruction."
        )
    return logger


def _listed(kind: type[Optimizer], base: type[Optimizer]) -> str:
    return ", ".join(map(repr, changed_names(kind, base)))


def pending_scale(optimizer: Optimizer) -> tuple[float, bool]:
    """Return what a fused step still divides gradients by, and whether a gradient scaler makes it skip."""
    scale = getattr(optimizer, "grad_scale", None)
    found_inf = getattr(optimizer, "found_inf", None)
    return (1.0 if scale is None else float(scale)), (found_inf is not None and bool(found_inf))


@logs(torch.optim.SGD)
class SGD(FactLogger):
    """torch.optim.SGD in every setting."""

    logs_restart = True

    def settings(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Setting]:
        """Return lr, momentum, dampening, weight_decay, nesterov, maximize, and whether a buffer exists."""
        return {
            "lr": float(group["lr"]),
            "momentum": float(group["momentum"]),
            "dampening": float(group["dampening"]),
            "weight_decay": float(group["weight_decay"]),
            "nesterov": bool(group["nesterov"]),
            "maximize": bool(group["maximize"]),
            "buffer": state.get("momentum_buffer") is not None,
        }

    def state(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the momentum buffer, where there is one."""
        buffer = state.get("momentum_buffer")
        return {} if buffer is None else {"momentum_buffer": buffer}

    def check_skipped(self, settings: Mapping[str, Setting], parameter: str) -> None:
        """Fused SGD creates its buffer even in a skipped step, and leaves it uninitialised."""
        if settings["momentum"] != 0.0 and not settings["buffer"]:
            raise RefusedError(
                f"The gradient scaler skips the first step of fused SGD with momentum; torch leaves the momentum "
                f"buffer of {parameter!r} uninitialised then. Use foreach=True, or a smaller initial scale."
            )


class Replayed(FactLogger):
    """An optimizer without coefficients: the settings of each step; its state is replayed from the gradients."""

    def __init__(self, kind: Kind[Any]) -> None:
        self._kind = kind
        self.rounds = kind.rounds

    def settings(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Setting]:
        """Return the settings that the replay needs."""
        return self._kind.encode(group)

    def state(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return every tensor of the state."""
        return {name: entry for name, entry in state.items() if isinstance(entry, Tensor)}

    def check_skipped(self, settings: Mapping[str, Setting], parameter: str) -> None:
        """A skipped step leaves moments of zero behind, as a step that never was."""


for _kind in kinds().values():
    _LOGGERS[_kind.optimizer] = Replayed(_kind)
