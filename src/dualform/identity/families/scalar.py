"""The scalar family: SGD in all its settings gives one number per step.

A step of SGD with gradient g acts linearly on the pair (W, B) of parameter and momentum buffer:

    d  = sign · g + decay · W
    B' = m B + k d                (m, k) = (momentum, 1 - dampening), or (0, 1) for the first buffer
    U  = B', or d + momentum · B' with Nesterov, or d without momentum
    W' = W - lr · U

so (W', B') = (W, B) A_s + g b_s with a 2×2 matrix A_s and a pair b_s per step. The share of g_s in the final W is b_s
times the product of all later matrices: one backward loop, O(S), in float64.

The same lines forwards are those of the elementwise family with numbers for matrices, so that a step of SGD is an
`ElementwiseStep` too, and a share of W can be moved with it step by step.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualform.errors import RefusedError
from dualform.identity.families.elementwise_recursions import AskedElements, ElementwiseBackward
from dualform.identity.families.elementwise_step import ElementwiseStep
from dualform.identity.families.optimizer_facts import Coefficients, CoefficientsOf, Facts, Series, UpdateRates
from dualform.identity.families.optimizer_kind import (
    AskedOutputs,
    OptimizerKind,
    ReplayedStep,
    Setting,
    Settings,
    State,
    register_optimizer,
)
from dualform.identity.families.rounding import near

_SGD_NUMBERS = ("lr", "momentum", "dampening", "weight_decay")
_SWITCHES = ("nesterov", "maximize")
_BUFFER = "buffer"
"""The setting that says whether the parameter had a momentum buffer before the step."""


def derive_scalar(facts: Facts, horizon: int, of: CoefficientsOf) -> Coefficients:
    """Derive SGD's coefficients; settings are rounded to the parameter's dtype first, as the step rounds them."""
    seen = int(np.searchsorted(facts.step, horizon))
    settings = facts.settings

    def rounded(name: str) -> list[float]:
        column = np.asarray(settings[name][:seen], dtype=np.float64)
        return column.astype(facts.dtype).astype(np.float64).tolist()  # type: ignore[no-any-return]

    lr, momentum, decay = rounded("lr"), rounded("momentum"), rounded("weight_decay")
    undampened = (1.0 - np.asarray(settings["dampening"][:seen], dtype=np.float64)).astype(facts.dtype)
    dampened: list[float] = undampened.astype(np.float64).tolist()
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


class SGDKind(OptimizerKind[ElementwiseStep]):
    """torch.optim.SGD in every setting."""

    family = "scalar: one number per step"
    logs_restart = True
    has_coefficients = True
    is_elementwise = True

    def __init__(self) -> None:
        super().__init__(torch.optim.SGD, "momentum_buffer")

    def encode(self, group: Mapping[str, Any], state: State) -> dict[str, Setting]:
        """Return the settings, and whether a momentum buffer exists."""
        return {
            **{name: float(group[name]) for name in _SGD_NUMBERS},
            **{name: bool(group[name]) for name in _SWITCHES},
            _BUFFER: state.get("momentum_buffer") is not None,
        }

    def encode_all(
        self, group: Mapping[str, Any], states: Mapping[Tensor, State], parameters: Sequence[Tensor]
    ) -> Sequence[Mapping[str, Setting]]:
        """Return the settings of each parameter: one object for all that have a momentum buffer, one for the others."""
        without = self.encode(group, {})
        if not states:
            return [without] * len(parameters)
        within = {**without, _BUFFER: True}
        return [
            without if states.get(parameter, {}).get("momentum_buffer") is None else within for parameter in parameters
        ]

    def decode(self, row: Mapping[str, Any]) -> Settings:
        """Return the settings, and whether a momentum buffer existed."""
        return {name: row[name] for name in (*_SGD_NUMBERS, *_SWITCHES, _BUFFER)}

    def example(self) -> Mapping[str, Setting]:
        """Return settings written down: making an optimizer loads the whole compiler of torch."""
        return dict.fromkeys(_SGD_NUMBERS, 0.0) | dict.fromkeys((*_SWITCHES, _BUFFER), False)

    def check_skipped(self, settings: Mapping[str, Setting], parameter: str) -> None:
        """Raise at the first step with momentum: fused SGD creates its buffer even in a skipped step, uninitialised."""
        if settings["momentum"] != 0.0 and not settings[_BUFFER]:
            raise RefusedError(
                f"The gradient scaler skips the first step of fused SGD with momentum; torch leaves the momentum "
                f"buffer of {parameter!r} uninitialised then. Use foreach=True, or a smaller initial scale."
            )

    def restart(self, settings: Settings, state: MutableMapping[str, Any]) -> None:
        """Drop the momentum buffer where training had none before the step."""
        if not settings[_BUFFER]:
            state.pop("momentum_buffer", None)

    def decays_gradient(self, settings: Settings) -> bool:
        """Say whether there is weight decay, which goes through the gradient."""
        return bool(settings["weight_decay"])

    def overwrites_gradient(self, settings: Settings) -> bool:
        """Say whether the step is one of Nesterov's, whose fast versions write the update into the gradient."""
        return bool(settings["nesterov"])

    def read(self, taken: ReplayedStep) -> ElementwiseStep:
        """Return a step, with its settings as the step itself rounded them."""
        return self.read_settings(taken.settings, taken.gradient.dtype)

    def read_settings(self, settings: Settings, dtype: torch.dtype) -> ElementwiseStep:
        """Return a step, with its settings as the step itself rounded them."""
        rounded = near(dtype)
        lr, momentum = rounded(settings["lr"]), rounded(settings["momentum"])
        sign = -1.0 if settings["maximize"] else 1.0
        decay = rounded(settings["weight_decay"])
        if momentum == 0.0:  # the buffer stays as it is
            return ElementwiseStep(alpha=1.0, on_gradient=lr, decay=decay, sign=sign)
        first = not settings[_BUFFER]
        return ElementwiseStep(
            alpha=0.0 if first else momentum,
            beta=1.0 if first else rounded(1.0 - settings["dampening"]),
            on_average=lr * momentum if settings["nesterov"] else lr,
            on_gradient=lr if settings["nesterov"] else 0.0,
            decay=decay,
            sign=sign,
        )

    def coefficients(self, facts: Facts, horizon: int, of: CoefficientsOf) -> Coefficients:
        """Return a parameter's coefficients after `horizon` steps."""
        return derive_scalar(facts, horizon, of)

    def setting_rates(self, facts: Facts) -> UpdateRates:
        """Return the rates in the long run, lr (1 − dampening) / (1 − momentum), and what decay takes at that rate."""

        def setting(name: str) -> Series:
            return np.asarray(facts.settings[name], dtype=np.float64)

        momentum = setting("momentum")
        undampened = np.where(momentum > 0, 1 - setting("dampening"), 1.0)
        each = setting("lr") * undampened / (1 - momentum)
        return UpdateRates(np.where(setting("maximize") > 0, -each, each), each * setting("weight_decay"))

    def backward(self, shape: Sequence[int]) -> ElementwiseBackward:
        """Return where the way back starts."""
        return ElementwiseBackward(shape)

    def backward_of(self, asked: AskedOutputs) -> AskedElements:
        """Return where the way back starts for some outputs alone."""
        return AskedElements(asked)


register_optimizer(SGDKind())
