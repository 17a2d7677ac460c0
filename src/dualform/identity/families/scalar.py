"""The scalar family: SGD in all its settings gives one number per step.

A step of SGD with gradient g acts linearly on the pair (W, B) of parameter and momentum buffer:

    d  = sign · g + decay · W
    B' = m B + k d                (m, k) = (momentum, 1 - dampening), or (0, 1) for the first buffer
    U  = B', or d + momentum · B' with Nesterov, or d without momentum
    W' = W - lr · U

so (W', B') = (W, B) A_s + g b_s with a 2×2 matrix A_s and a pair b_s per step. The share of g_s in the final W is b_s
times the product of all later matrices: one backward loop, O(S), in float64.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from dualform.identity.families.family import Coefficients, Facts, Of, derives
from dualform.identity.families.replayed import Kind, Setting, Settings, Taken


@derives("SGD")
def derive_scalar(facts: Facts, horizon: int, of: Of) -> Coefficients:
    """Derive SGD's coefficients; settings are rounded to the parameter's dtype first, as the step rounds them."""
    seen = int(np.searchsorted(facts.step, horizon))
    settings = facts.settings

    def rounded(name: str) -> list[float]:
        column = np.asarray(settings[name][:seen], dtype=np.float64)
        return column.astype(facts.dtype).astype(np.float64).tolist()  # type: ignore[no-any-return]

    lr, momentum, decay = rounded("lr"), rounded("momentum"), rounded("weight_decay")
    kept = (1.0 - np.asarray(settings["dampening"][:seen], dtype=np.float64)).astype(facts.dtype)
    dampened: list[float] = kept.astype(np.float64).tolist()
    nesterov, maximize, buffered = (settings[name][:seen].tolist() for name in ("nesterov", "maximize", "buffer"))

    step = np.zeros(horizon, dtype=np.float64)
    v_weight, v_buffer = (1.0, 0.0) if of == "parameter" else (0.0, 1.0)
    for i in range(seen - 1, -1, -1):
        sign = -1.0 if maximize[i] else 1.0
        mu, wd, rate = momentum[i], decay[i], lr[i]
        if mu == 0.0:
            step[facts.step[i]] = -rate * sign * v_weight
            v_weight *= 1.0 - rate * wd
            continue
        m, k = (mu, dampened[i]) if buffered[i] else (0.0, 1.0)
        # U = direct · d + through · B'
        direct, through = (1.0, mu) if nesterov[i] else (0.0, 1.0)
        on_gradient = direct + through * k  # what U takes of d
        step[facts.step[i]] = sign * (-rate * on_gradient * v_weight + k * v_buffer)
        v_weight, v_buffer = (
            v_weight * (1.0 - rate * on_gradient * wd) + v_buffer * k * wd,
            v_weight * (-rate * through * m) + v_buffer * m,
        )
    return Coefficients(step=step, start=v_weight, buffer=v_buffer)


_SETTINGS = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")


class Descent(Kind[None]):
    """SGD as torch takes its steps, replayed only to see how they are rounded: it is not registered as replayed."""

    family = "scalar: one number per step"

    def __init__(self) -> None:
        super().__init__(torch.optim.SGD, "momentum_buffer")

    def make(self, parameter: Tensor) -> Optimizer:
        """Return torch's own optimizer, with its plain loop over parameters."""
        make: Callable[..., Optimizer] = self.optimizer
        return make([parameter], lr=0.0, foreach=False)

    def encode(self, group: Mapping[str, Any]) -> dict[str, Setting]:
        """Return the settings."""
        return {name: group[name] for name in _SETTINGS}

    def decode(self, row: Mapping[str, Any]) -> Settings:
        """Return the settings."""
        return {name: row[name] for name in _SETTINGS}

    def read(self, taken: Taken) -> None:
        """Return nothing: the step's coefficient says all of it."""

    def backward(self, shape: Sequence[int]) -> NoReturn:
        """Raise: the way back over these steps is `derive_scalar`."""
        raise AssertionError("SGD has coefficients")
