"""The elementwise family: Adam and its relatives multiply a gradient by a matrix per step, element by element.

Given their second moments, which depend on the whole gradient, all of these optimizers are linear. With gradient g,

    d  = sign · g + decay · W              (coupled decay)
    m' = α m + β ⊙ d
    W' = κ W − P ⊙ m' − Q ⊙ d              (κ < 1: decoupled decay)

α, κ are numbers, β, P, Q numbers or matrices. So a share of W (that of a group of patterns, or of the start) follows
the same three lines, and shares stay additive:

    W = W_start + sum over groups W_group

The second moments come from a replay of torch's own optimizer on the rebuilt gradients. An optimizer registers a
function that reads α, β, κ, P, Q off its settings and its state after the step; everything else is shared.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dualform.identity.families.elementwise_recursions import AskedElements, ElementwiseBackward, ElementwiseSpread
from dualform.identity.families.elementwise_step import ElementwiseStep
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

Reading = Callable[[Settings, State, State], ElementwiseStep]

ReadingTogether = Callable[[Sequence[tuple[Settings, State]]], list[ElementwiseStep]]
"""Reads the steps of several parameters off their settings and their states after the step."""


class ElementwiseKind(OptimizerKind[ElementwiseStep]):
    """An optimizer of this family: its torch class, what to log of a group, and how to read a step."""

    family = "elementwise: one matrix per step"
    is_elementwise = True

    def __init__(
        self,
        optimizer: type[Optimizer],
        settings: tuple[str, ...],
        read: Reading,
        *,
        average: str | None,
        state_settings: tuple[str, ...],
        overwrites_state: tuple[str, ...],
        decoupled: bool,
        by_average: bool,
        together: ReadingTogether | None,
    ) -> None:
        super().__init__(optimizer, average)
        self._by_average = by_average
        self.settings = settings
        self.state_settings = state_settings
        self.overwrites_state = overwrites_state
        self._decoupled = decoupled
        self._read = read
        self._read_together = together

    def encode(self, group: Mapping[str, Any], state: State) -> dict[str, Setting]:
        """Return the settings; betas are two."""
        found: dict[str, Setting] = {}
        for name in self.settings:
            value = group[name]
            if name == "betas":
                found["beta1"], found["beta2"] = (float(beta) for beta in value)
            else:
                found[name] = value if isinstance(value, bool) else float(value)
        return found

    def encode_all(
        self, group: Mapping[str, Any], states: Mapping[Tensor, State], parameters: Sequence[Tensor]
    ) -> Sequence[Mapping[str, Setting]]:
        """Return the settings, which depend on no parameter's state."""
        return [self.encode(group, {})] * len(parameters)

    def decode(self, row: Mapping[str, Any]) -> Settings:
        """Return the settings."""
        found = {name: row[name] for name in self.settings if name in row}
        return found | {"betas": (row["beta1"], row["beta2"])} if "betas" in self.settings else found

    def decays_gradient(self, settings: Settings) -> bool:
        """Say whether the step adds a part of the parameter to its gradient."""
        decoupled = self._decoupled or settings.get("decoupled_weight_decay", False)
        return bool(settings.get("weight_decay", 0.0)) and not decoupled

    def takes_gradient_by_average(self, settings: Settings) -> bool:
        """Say whether the optimizer takes its gradient by way of its average alone, and no decay goes through it."""
        return self._by_average and not self.decays_gradient(settings)

    def read(self, taken: ReplayedStep) -> ElementwiseStep:
        """Return a step with its numbers as the step itself rounded them, to the parameter's dtype.

        A first moment is a lerp, `m + β (d − m)`, so that its α is what β leaves.
        """
        before, after = (_in_precision(state, taken.precision) for state in (taken.before, taken.after))
        return self._rounded(self._read(taken.settings, before, after), taken.gradient.dtype)

    def read_together(self, taken: Sequence[ReplayedStep]) -> list[ElementwiseStep]:
        """Return the steps of several parameters, which some optimizers read by a few kernels for all of them."""
        if self._read_together is None or len(taken) == 1:
            return super().read_together(taken)
        found = self._read_together([(one.settings, _in_precision(one.after, one.precision)) for one in taken])
        return [self._rounded(linear, one.gradient.dtype) for linear, one in zip(found, taken, strict=True)]

    def _rounded(self, linear: ElementwiseStep, dtype: torch.dtype) -> ElementwiseStep:
        """Return a step with its numbers as the step itself rounded them."""
        number = None if isinstance(linear.beta, Tensor) else linear.beta
        alpha, rounded_beta, kappa, decay = _rounded_numbers(linear.alpha, number, linear.kappa, linear.decay, dtype)
        return ElementwiseStep(
            alpha,
            linear.beta if rounded_beta is None else rounded_beta,
            kappa,
            linear.on_average,
            linear.on_gradient,
            decay,
            linear.sign,
            linear.reach,
            linear.corrected,
        )

    def backward(self, shape: Sequence[int]) -> ElementwiseBackward:
        """Return where the way back starts."""
        return ElementwiseBackward(shape)

    def backward_of(self, asked: AskedOutputs) -> AskedElements:
        """Return where the way back starts for some outputs alone."""
        return AskedElements(asked)

    def spread(self, shape: Sequence[int]) -> ElementwiseSpread:
        """Return that there is no doubt yet."""
        return ElementwiseSpread(shape)


def reads(
    optimizer: type[Optimizer],
    *settings: str,
    average: str | None = None,
    state_settings: tuple[str, ...] = (),
    overwrites_state: tuple[str, ...] = (),
    decoupled: bool = False,
    by_average: bool = False,
    together: ReadingTogether | None = None,
) -> Callable[[Reading], Reading]:
    """Register a function that reads a step of an optimizer.

    Args:
        optimizer: the optimizer's type.
        settings: the names of its settings that are logged.
        average: the state entry that m is; None where it keeps no average.
        state_settings: settings that make it keep more state from its first step on.
        overwrites_state: state entries that a step overwrites and the function needs as they were before it.
        decoupled: whether its weight decay never goes through the gradient.
        by_average: whether a step without decay takes its gradient by way of the average alone.
        together: reads the steps of several parameters at once, as the function reads each.
    """

    def register(read: Reading) -> Reading:
        kind = ElementwiseKind(
            optimizer,
            settings,
            read,
            average=average,
            state_settings=state_settings,
            overwrites_state=overwrites_state,
            decoupled=decoupled,
            by_average=by_average,
            together=together,
        )
        register_optimizer(kind)
        return read

    return register


@functools.lru_cache(maxsize=64)
def _rounded_numbers(
    alpha: float, beta: float | None, kappa: float, decay: float, dtype: torch.dtype
) -> tuple[float, float | None, float, float]:
    """Return α, β, κ and the decay of a step as a step in a dtype rounds them; β is None where it is a matrix."""
    rounded = near(dtype)
    if beta is not None:
        beta = rounded(beta)
    return rounded(alpha) if beta is None or not alpha else 1 - beta, beta, rounded(kappa), rounded(decay)


def _in_precision(state: State, dtype: torch.dtype) -> State:
    """Return a state whose tensors have a dtype; the state itself where they have it already."""
    for entry in state.values():
        if isinstance(entry, Tensor) and entry.dtype != dtype:
            break
    else:
        return state
    return {
        name: entry.to(dtype) if isinstance(entry, Tensor) and entry.dtype != dtype else entry
        for name, entry in state.items()
    }
