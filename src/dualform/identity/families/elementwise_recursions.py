"""Ways through many steps of the elementwise family: back, for all outputs or some, and forward with doubts."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dualform.identity.families.elementwise_step import ElementwiseStep
from dualform.identity.families.optimizer_kind import (
    AskedOutputs,
    AskedRecursion,
    BackwardRecursion,
    DoubtfulStep,
    Multiplier,
    Settings,
    Spread,
)
from dualform.identity.parameter_maps import ParameterMap


@dataclass(frozen=True, slots=True)
class ElementwiseMultiplier(Multiplier):
    """A matrix in the parameter's shape, A_s, multiplied element by element."""

    matrix: Tensor

    def to(self, like: Tensor) -> "ElementwiseMultiplier":
        """Return it on the device and in the dtype of a tensor."""
        return ElementwiseMultiplier(self.matrix.to(like))

    def contribute(
        self, parameter_map: ParameterMap, queries: Tensor, keys: Tensor, values: Tensor, units: Tensor
    ) -> Tensor:
        """Return e_o · x · (A_s[o] ⊙ q), for a matrix."""
        return parameter_map.unit_factors(queries, keys, units, self.matrix) * values[:, units].T


class ElementwiseBackward(BackwardRecursion[ElementwiseStep]):
    """The way back of this family.

    With v on W' and u on m', where `W' = κ W − P ⊙ m' − Q ⊙ d` and `m' = α m + β ⊙ d`:

        a = u − P ⊙ v        w = β ⊙ a − Q ⊙ v        A_s = sign · w
        u ← α a              v ← κ v + decay · w
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self._on_weight = torch.ones(*shape, dtype=torch.float64)
        self._on_average = torch.zeros(*shape, dtype=torch.float64)

    def step(self, linear: ElementwiseStep) -> ElementwiseMultiplier:
        """Go back over one step, and return its A_s."""
        average = self._on_average - linear.on_average * self._on_weight
        moved = linear.beta * average - linear.on_gradient * self._on_weight
        self._on_average = linear.alpha * average
        self._on_weight = linear.kappa * self._on_weight + linear.decay * moved
        return ElementwiseMultiplier(linear.sign * moved)


@dataclass(frozen=True, slots=True)
class AskedElementsMultiplier(Multiplier):
    """Some elements of A_s: those that act on the outputs that are asked about.

    Attributes:
        elements: (n,)
        places: (n,) where they are in A_s, counted over all of its axes.
        shape: that of A_s.
    """

    elements: Tensor
    places: Tensor
    shape: tuple[int, ...]

    def to(self, like: Tensor) -> "AskedElementsMultiplier":
        """Return it on the device and in the dtype of a tensor."""
        return AskedElementsMultiplier(self.elements.to(like), self.places.to(like.device), self.shape)

    def contribute(
        self, parameter_map: ParameterMap, queries: Tensor, keys: Tensor, values: Tensor, units: Tensor
    ) -> Tensor:
        """Return what `ElementwiseMultiplier` does, with zeros in place of all elements that do not act here."""
        matrix = self.elements.new_zeros(self.shape)
        matrix.view(-1)[self.places] = self.elements
        return ElementwiseMultiplier(matrix).contribute(parameter_map, queries, keys, values, units)


class AskedElements(AskedRecursion[ElementwiseStep]):
    """The way back of this family for some outputs: every element goes its own way, so that the others are left out."""

    def __init__(self, asked: AskedOutputs) -> None:
        read = asked.parameter_map.asked_elements(asked.queries, asked.units, asked.shape)
        self._shape = asked.shape
        self._places = read.reshape(-1).nonzero()[:, 0]
        self._backward = ElementwiseBackward((len(self._places),))
        self.bytes_per_step = 8 * 2 * len(self._places)  # P, and one of β and Q

    def keep(self, linear: ElementwiseStep) -> ElementwiseStep:
        """Return a step with the asked elements of its matrices."""

        def mine(factor: Tensor | float) -> Tensor | float:
            return factor.reshape(-1)[self._places] if isinstance(factor, Tensor) else factor

        beta, on_average, on_gradient = map(mine, (linear.beta, linear.on_average, linear.on_gradient))
        return dataclasses.replace(linear, beta=beta, on_average=on_average, on_gradient=on_gradient)

    def step(self, kept: ElementwiseStep) -> AskedElementsMultiplier:
        """Go back over one step, and return the asked elements of its A_s."""
        return AskedElementsMultiplier(self._backward.step(kept).matrix, self._places, self._shape)


class ElementwiseSpread(Spread[ElementwiseStep]):
    """What doubt about gradients does in this family, where a step divides a gradient by its own size.

    A gradient that is known to within δ moves an element by δ (P + Q) more or less, over the steps in which its average
    remembers it. But no gradient moves an element by much more than the learning rate: where rounding is all there is
    of the gradient, P = lr / |g| is as uncertain as g, and two roundings move the element by lr in opposite directions.
    Doubts of several steps are independent, so that their squares add up:

        u² ← κ² u² + (1 / (1 / (δ (n P + Q)) + 1 / (2 lr)))²        n ← α n + β

    n is what the average has taken up of a steady gradient, for Adam 1 − αᵗ, which P is corrected for. RMSprop, which
    corrects nothing, moves further than lr in its first steps: `reach` says how far.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self._square = torch.zeros(*shape, dtype=torch.float64)
        self._response: Tensor | float = 0.0

    def step(self, linear: ElementwiseStep, settings: Settings, doubt: Tensor) -> None:
        """Follow one step."""
        self._response = linear.alpha * self._response + linear.beta
        moved = doubt.double() * (linear.on_average * self._response + linear.on_gradient)
        if reach := linear.reach * settings["lr"]:
            moved = 1 / (1 / moved + 1 / (2 * reach))
        self._square = linear.kappa**2 * self._square.to(moved) + moved.square()

    @classmethod
    def step_together(
        cls, spreads: Sequence["ElementwiseSpread"], steps: Sequence[DoubtfulStep[ElementwiseStep]]
    ) -> None:
        """Follow the steps of several parameters; those whose steps have the same numbers as one long vector."""
        alike: dict[tuple[Any, ...], list[tuple[ElementwiseSpread, DoubtfulStep[ElementwiseStep]]]] = {}
        for spread, step in zip(spreads, steps, strict=True):
            linear = step.linear
            factors = (spread._response, linear.beta, linear.on_average, linear.on_gradient)
            numbers = ("matrix" if isinstance(factor, Tensor) else factor for factor in factors)
            at = (linear.alpha, linear.kappa, linear.reach, step.settings["lr"], step.doubt.device, *numbers)
            alike.setdefault(at, []).append((spread, step))
        for pairs in alike.values():
            mine, taken = zip(*pairs, strict=True)
            joined = cls((0,))
            joined._square = torch.cat([one._square.to(step.doubt.device).reshape(-1) for one, step in pairs])
            joined._response = _joined_factor([one._response for one in mine])
            linears = [step.linear for step in taken]
            linear = dataclasses.replace(
                linears[0],
                beta=_joined_factor([one.beta for one in linears]),
                on_average=_joined_factor([one.on_average for one in linears]),
                on_gradient=_joined_factor([one.on_gradient for one in linears]),
            )
            joined.step(linear, taken[0].settings, torch.cat([step.doubt.reshape(-1) for step in taken]))
            sizes = [step.doubt.numel() for step in taken]
            squares, response = joined._square.split(sizes), joined._response
            responses = response.split(sizes) if isinstance(response, Tensor) else [response] * len(sizes)
            for (one, step), square, left in zip(pairs, squares, responses, strict=True):
                shape = step.doubt.shape
                one._square = square.view(shape)
                one._response = left.view(shape) if isinstance(left, Tensor) else left

    @property
    def size(self) -> Tensor:
        """The standard deviation of each element."""
        return self._square.sqrt()

    @property
    def state(self) -> Mapping[str, Tensor]:
        """The squares u² and the response n."""
        return {"square": self._square, "response": torch.as_tensor(self._response, dtype=torch.float64)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from the squares u² and the response n."""
        response = state["response"]
        self._square, self._response = state["square"], response if response.dim() else float(response)


def _joined_factor(factors: Sequence[Tensor | float]) -> Tensor | float:
    """Return the factors of several parameters as one vector, where they are matrices, and the number otherwise."""
    matrices = [factor.reshape(-1) for factor in factors if isinstance(factor, Tensor)]
    return torch.cat(matrices) if matrices else factors[0]
