"""Which facts of an optimizer's step are logged, one registered class per optimizer.

Looked up by exact type: a subclass may do anything (AdamW is an Adam). Nothing here derives coefficients.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from dualform.coefficients import kinds
from dualform.coefficients.replayed import Kind, Setting
from dualform.errors import RefusedError


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


def find_logger(optimizer: Optimizer) -> FactLogger | None:
    """Return the logger for an optimizer's exact type, or nothing."""
    return _LOGGERS.get(type(optimizer))


def require_logger(optimizer: Optimizer) -> FactLogger:
    """Return the logger for an optimizer's exact type, or refuse by name."""
    logger = find_logger(optimizer)
    if logger is None:
        raise RefusedError(
            f"{type(optimizer).__name__} is not an optimizer whose coefficients are known; supported: "
            f'{", ".join(supported())}. Record keys only (layers={{"*": "keys"}}) to have attention without '
            "reconstruction."
        )
    return logger


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
