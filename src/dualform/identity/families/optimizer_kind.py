"""What every optimizer family gives, and the registry of optimizers.

A step of an optimizer is read as a linear map of the parameter W, an average m, and the gradient g:

    (W', m') = step(W, m, g)

SGD's maps are made of numbers that are settings, so that a pattern has a coefficient. Those of other optimizers depend
on the gradients themselves: their steps are taken again by torch's own optimizer, and each is read off its state.

An optimizer is one `OptimizerKind`, registered with `register_optimizer` under its type. A family of them has a file
beside this one: a `StepMap` (a step), a `BackwardRecursion` (the same steps from the last to the first) and a
`Multiplier` (what the gradient of a step is multiplied with in the end). Nothing outside these files knows which
families there are.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from dualform.errors import FormatError
from dualform.identity.families.naming import class_name, full_name, optimizer_name
from dualform.identity.families.optimizer_facts import Coefficients, CoefficientsOf, Facts, MeasuredRate, UpdateRates
from dualform.identity.parameter_maps import ParameterMap

State = Mapping[str, Any]
Settings = Mapping[str, Any]
Setting = float | bool | str
"""What the steps table holds of a setting."""


@dataclass(frozen=True, slots=True)
class StepMatrix:
    """A step whose map is made of numbers: (W', m') = A (W, m) + b g.

    Attributes:
        weight: what W' takes of W and of m, the first row of A.
        average: what m' takes of W and of m, the second row of A.
        gradient: what W' and m' take of the gradient, b.
    """

    weight: tuple[float, float] = (1.0, 0.0)
    average: tuple[float, float] = (0.0, 1.0)
    gradient: tuple[float, float] = (0.0, 0.0)

    def after(self, earlier: "StepMatrix") -> "StepMatrix":
        """Return this map after an earlier one, the earlier one's gradient carried on; its own gradient is left out."""

        def row(mine: tuple[float, float]) -> tuple[float, float]:
            return (
                mine[0] * earlier.weight[0] + mine[1] * earlier.average[0],
                mine[0] * earlier.weight[1] + mine[1] * earlier.average[1],
            )

        def carried(mine: tuple[float, float]) -> float:
            return mine[0] * earlier.gradient[0] + mine[1] * earlier.gradient[1]

        return StepMatrix(row(self.weight), row(self.average), (carried(self.weight), carried(self.average)))


class StepMap(ABC):
    """One step of one parameter, as a linear map; its matrices have the dtype that the step was read in."""

    noise: float = 0.0
    """The size that the step's own rounding is expected to have; 0 where it is that of the parameter's dtype."""

    kappa: float
    """What the step leaves of the parameter."""

    decay: float = 0.0
    """What the step adds of the parameter to its gradient (coupled weight decay)."""

    @abstractmethod
    def step(self, share: Tensor, average: Tensor, gradient: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return a share of W and of m after the step, given both before it and its own gradient (None for zero)."""

    @property
    @abstractmethod
    def moves_average(self) -> bool:
        """Whether the step changes the average."""

    @property
    def matrix(self) -> StepMatrix | None:
        """The step as numbers; None where its map is not made of numbers alone."""
        return None

    @property
    def lerp(self) -> tuple[float, float] | None:
        """The numbers by which the average takes up a gradient, m' = a m + b g, if the step uses it nowhere else.

        A share's gradient can then be added to its average as it is computed. None for other steps.
        """
        return None

    @classmethod
    @abstractmethod
    def follow_all(cls, moves: "Sequence[Move[Any]]") -> None:
        """Do what `step` does to many shares at once, in place, in the dtype and on the device of the shares.

        The moves are of one family; their steps may be those of several parameters.
        """

    def rate(self, gradient: Tensor) -> MeasuredRate:
        """Return how fast the parameter learns in this step, measured along the step's gradient.

        The gradient moves the parameter now, and by what later steps take from the average, each less by one factor.
        """
        wide = gradient.double()
        square = float(wide.square().sum())
        if not square:
            return MeasuredRate(0.0, 0.0, 0.0)
        zero = torch.zeros_like(wide)
        now, average = self.step(zero, zero, wide)
        later, left = self.step(zero, average, None)
        norm = float(average.square().sum())
        alpha = float((left * average).sum()) / norm if norm else 0.0  # what a step leaves of the average
        total = now + later / (1 - alpha)
        along = -float((total * wide).sum()) * self.bias_correction(alpha)
        return MeasuredRate(along, square, self.decay * abs(along) / square - math.log(self.kappa))

    def bias_correction(self, alpha: float) -> float:
        """Return what undoes the division of the average by 1 − αᵗ, where the step divides it, given α; else 1."""
        return 1.0


M = TypeVar("M", bound=StepMap)


@dataclass(frozen=True, slots=True)
class Move(Generic[M]):
    """A step that some shares of its parameter are to follow.

    Several shares may lie in one tensor (G, ...), with their averages and their gradients in tensors of the same shape.

    Attributes:
        linear: the step.
        shares: shares of W before the step, which are written to.
        averages: their averages, which are written to; anything where the step neither changes nor uses an average.
        gradients: the gradient of each share, None for zero.
        averages_moved: whether the averages are those after the step already, so that they stay as they are.
        scale: what the shares are divided by, with the κ of this step and of earlier ones in it, so that no pass over
            them multiplies by κ; None where they are the shares themselves. For steps that have a `lerp`.
    """

    linear: M
    shares: list[Tensor]
    averages: list[Tensor]
    gradients: Sequence[Tensor | None]
    averages_moved: bool = False
    scale: float | None = None


class Multiplier(ABC):
    """What the gradient of one step is multiplied with in the final parameter."""

    @abstractmethod
    def to(self, like: Tensor) -> Self:
        """Return it on the device and in the dtype of a tensor."""

    @abstractmethod
    def contribute(
        self, parameter_map: ParameterMap, queries: Tensor, keys: Tensor, values: Tensor, units: Tensor
    ) -> Tensor:
        """Return what each pattern adds to one output unit of each query, (Q, T).

        Args:
            parameter_map: how the parameter is made of patterns.
            queries: (Q, d_in)
            keys: (T, d_in)
            values: (T, d_out)
            units: (Q,)
        """


def follow_together(moves: Sequence[Move[Any]]) -> None:
    """Let shares follow their steps, which may be of several families."""
    families: dict[type[StepMap], list[Move[Any]]] = {}
    for move in moves:
        families.setdefault(type(move.linear), []).append(move)
    for family, mine in families.items():
        family.follow_all(mine)


class BackwardRecursion(ABC, Generic[M]):
    """What multiplies a step's gradient in the final parameter, carried from the last step to the first."""

    @abstractmethod
    def step(self, linear: M) -> Multiplier:
        """Go back over one step, and return its multiplier."""


@dataclass(frozen=True, slots=True)
class AskedOutputs:
    """The outputs that a question for contributions of single patterns is about, as one use of a parameter makes them.

    Attributes:
        parameter_map: how the parameter is made of patterns.
        queries: (Q, d_in), in the CPU's memory.
        units: (Q,) the output unit of each query, in the CPU's memory.
        d_out: the number of output units.
        shape: the parameter's shape.
    """

    parameter_map: ParameterMap
    queries: Tensor
    units: Tensor
    d_out: int
    shape: tuple[int, ...]


class AskedRecursion(ABC, Generic[M]):
    """A backward recursion for some outputs alone: of each step it needs only what acts on these outputs.

    Going forwards, `keep` takes that of each step; then `step` goes back over what was kept, the last step first.
    """

    bytes_per_step: int
    """Size of what is kept of a step, at most."""

    @abstractmethod
    def keep(self, linear: M) -> M:
        """Return what acts on the asked outputs of a step, as a smaller map."""

    @abstractmethod
    def step(self, kept: M) -> Multiplier:
        """Go back over one step, and return its multiplier for the asked outputs."""


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """One step that torch's own optimizer has taken, in a replay or while training.

    Attributes:
        settings: the optimizer's settings in the step.
        gradient: the gradient that the step took; an empty one of its dtype where the optimizer's kind
            `takes_gradient_by_average`.
        before: the state before the step; of a live step, the entries that `OptimizerKind.overwrites_state` names.
        after: the state after the step.
        precision: the dtype in which the step's matrices are wanted.
    """

    settings: Settings
    gradient: Tensor
    before: State
    after: State
    precision: torch.dtype = torch.float64


@dataclass(frozen=True, slots=True)
class DoubtfulStep(Generic[M]):
    """A step of one parameter whose gradient is known to within a doubt.

    Attributes:
        linear: the step's map.
        settings: the optimizer's settings in the step.
        doubt: how far each element of the gradient may be off, at random, in the parameter's shape.
    """

    linear: M
    settings: Settings
    doubt: Tensor


class Spread(ABC, Generic[M]):
    """How far doubt about the gradients of all steps so far may have carried each element of a parameter."""

    @abstractmethod
    def step(self, linear: M, settings: Settings, doubt: Tensor) -> None:
        """Follow one step, whose gradient is known to within `doubt`, at random, in the parameter's shape."""

    @classmethod
    @abstractmethod
    def step_together(cls, spreads: Sequence[Self], steps: Sequence[DoubtfulStep[Any]]) -> None:
        """Do what `step` does for several parameters, by as few kernels as may be."""

    @property
    @abstractmethod
    def size(self) -> Tensor:
        """The standard deviation of each element, in the parameter's shape, float64."""

    @property
    @abstractmethod
    def state(self) -> Mapping[str, Tensor]:
        """The tensors, by name, from which a new `Spread` of the same parameter can go on."""

    @abstractmethod
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from the tensors that `state` gave."""


class OptimizerKind(ABC, Generic[M]):
    """One optimizer: which settings are logged of a step, how the step is taken again, and how it is read as a map."""

    family: ClassVar[str]
    """The family's name, and what multiplies a gradient."""

    needs_whole_matrix: ClassVar[bool] = False
    """Whether a step of some rows of a matrix depends on its other rows."""
    rounds: ClassVar[bool] = False
    """Whether its steps round more coarsely than the parameter's dtype, so that the rounding is followed as a term."""

    logs_restart: ClassVar[bool] = False
    """Whether the settings say that the state was cleared, so that the step is exact all the same."""

    state_settings: tuple[str, ...] = ()
    """Settings that make the optimizer keep more state from its first step on, and cannot be turned on later."""

    has_coefficients: ClassVar[bool] = False
    """Whether the steps' maps follow from settings alone, so that a pattern has a coefficient."""

    is_elementwise: ClassVar[bool] = False
    """Whether its steps multiply a gradient element by element, by numbers or matrices."""

    overwrites_state: tuple[str, ...] = ()
    """State entries that a step overwrites and `read` needs as they were before it."""

    options: ClassVar[Mapping[str, Any]] = {"foreach": False}
    """How torch's optimizer is made for a replay: with its plain loop over parameters."""

    def __init__(self, optimizer: type[Optimizer], average: str | None) -> None:
        self.optimizer = optimizer
        self.average = average  # the state entry that m is

    @property
    def name(self) -> str:
        """The name of the optimizer's type, as a run keeps it."""
        return optimizer_name(self.optimizer)

    def make(self, parameter: Tensor) -> Optimizer:
        """Return torch's own optimizer for one parameter."""
        make: Callable[..., Optimizer] = self.optimizer
        return make([parameter], lr=0.0, **self.options)

    @abstractmethod
    def encode(self, group: Mapping[str, Any], state: State) -> dict[str, Setting]:
        """Return a group's settings as the steps table holds them, given also the parameter's state before the step."""

    def encode_all(
        self, group: Mapping[str, Any], states: Mapping[Tensor, State], parameters: Sequence[Tensor]
    ) -> Sequence[Mapping[str, Setting]]:
        """Return what `encode` does for each of some parameters of a group; equal settings may be one object.

        Args:
            group: the group.
            states: the optimizer's state, by parameter.
            parameters: the parameters.
        """
        return [self.encode(group, states.get(parameter, {})) for parameter in parameters]

    @abstractmethod
    def decode(self, row: Mapping[str, Any]) -> Settings:
        """Return a group's settings, from a row of the steps table; the inverse of `encode`."""

    def example(self) -> Mapping[str, Setting]:
        """Return settings as the steps table holds them, to compare names and types with."""
        return self.encode(self.make(torch.zeros(1, 1)).param_groups[0], {})

    def warm_state(self, state: State) -> dict[str, Tensor]:
        """Return the tensors of a parameter's optimizer state, which are part of the start where it is warm already."""
        return {name: entry for name, entry in state.items() if isinstance(entry, Tensor)}

    def check_skipped(self, settings: Mapping[str, Setting], parameter: str) -> None:
        """Raise if a fused step that a gradient scaler skips would leave a broken state behind."""

    def restart(self, settings: Settings, state: MutableMapping[str, Any]) -> None:
        """Clear the state of a replay before a step whose settings say that it was cleared in training."""

    def decays_gradient(self, settings: Settings) -> bool:
        """Say whether a step adds a part of the parameter to its gradient (coupled weight decay)."""
        return False

    def overwrites_gradient(self, settings: Settings) -> bool:
        """Say whether a step may write to the gradient that it takes."""
        return False

    def takes_gradient_by_average(self, settings: Settings) -> bool:
        """Say whether a step uses its gradient for the average alone: then the average after it tells the whole step.

        `StepMap.lerp` of such a step is never None, and `read` needs of the gradient no more than its dtype.
        """
        return False

    @abstractmethod
    def read(self, taken: ReplayedStep) -> M:
        """Return a step as a linear map."""

    def read_settings(self, settings: Settings, dtype: torch.dtype) -> M:
        """Return a step as a linear map from its settings alone, if the optimizer has coefficients.

        Args:
            settings: the optimizer's settings in the step.
            dtype: the dtype of the parameter, to which the step rounds its settings.
        """
        raise _no_coefficients(self.name)

    def read_together(self, taken: Sequence[ReplayedStep]) -> list[M]:
        """Return the steps of several parameters as linear maps, the same that `read` gives of each."""
        return [self.read(one) for one in taken]

    def coefficients(self, facts: Facts, horizon: int, of: CoefficientsOf) -> Coefficients:
        """Return a parameter's coefficients after `horizon` steps, if the optimizer has coefficients."""
        raise _no_coefficients(facts.optimizer)

    def setting_rates(self, facts: Facts) -> UpdateRates | None:
        """Return the rates of a parameter's updates from its settings alone; None if they depend on gradients."""
        return None

    @abstractmethod
    def backward(self, shape: Sequence[int]) -> BackwardRecursion[M]:
        """Return where the way back starts for a parameter of this shape."""

    @abstractmethod
    def backward_of(self, asked: AskedOutputs) -> AskedRecursion[M]:
        """Return where the way back starts for some outputs alone."""

    def spread(self, shape: Sequence[int]) -> Spread[M] | None:
        """Return where doubt about gradients starts from, or None if the optimizer's steps do not amplify it."""
        return None


_OPTIMIZER_KINDS: dict[type[Optimizer], OptimizerKind[Any]] = {}
_OPTIMIZER_KINDS_BY_NAME: dict[str, OptimizerKind[Any]] = {}


def register_optimizer(kind: OptimizerKind[Any]) -> None:
    """Register an optimizer, by its type."""
    _OPTIMIZER_KINDS[kind.optimizer] = kind
    _OPTIMIZER_KINDS_BY_NAME[kind.name] = kind


def optimizer_kinds() -> Mapping[type[Optimizer], OptimizerKind[Any]]:
    """Return every known optimizer by its type."""
    return _OPTIMIZER_KINDS


def find_optimizer_kind(name: str) -> OptimizerKind[Any] | None:
    """Return the optimizer that a run names, or None if it is not known; a name without a module is torch's."""
    return _OPTIMIZER_KINDS_BY_NAME.get(full_name(name))


def derive(facts: Facts, *, horizon: int, of: CoefficientsOf = "parameter") -> Coefficients:
    """Derive the coefficients of a parameter (or of its momentum buffer) after `horizon` steps."""
    return require_optimizer_kind(facts.optimizer).coefficients(facts, horizon, of)


def require_optimizer_kind(name: str) -> OptimizerKind[Any]:
    """Return the optimizer that a run names, or raise if it is not known."""
    found = find_optimizer_kind(name)
    if found is None:
        raise _no_coefficients(name)
    return found


def _no_coefficients(name: str) -> FormatError:
    known = ", ".join(sorted(class_name(kind.name) for kind in _OPTIMIZER_KINDS.values() if kind.has_coefficients))
    return FormatError(
        f"The run was trained by {class_name(name)!r}; coefficients are known for {known}. "
        "Open it with a newer dualform."
    )
