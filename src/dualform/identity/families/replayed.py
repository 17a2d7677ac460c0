"""What every replayed family gives, and the registry of its optimizers.

Some optimizers have no coefficients: what multiplies a gradient depends on the gradients themselves. They are replayed,
and each step of the replay is read as a linear map of the parameter W, an average m, and the gradient g:

    (W', m') = map(W, m, g)

A family is one file beside this one: a `Map` (a step), a `Backward` (the same steps from the last to the first), a
`Multiplier` (what the gradient of a step is multiplied with in the end), and a `Kind` per optimizer, registered with
`replays`. Nothing outside those files knows which families there are.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from dualform.identity.parameter_maps import ParameterMap
from dualform.torch_modes import without_gradients

State = Mapping[str, Any]
Settings = Mapping[str, Any]
Setting = float | bool | str
"""What the steps table holds of a setting."""


class Map(ABC):
    """One step of one parameter, as a linear map in float64."""

    noise: float = 0.0
    """The size that the step's own rounding is expected to have; 0 where it is that of the parameter's dtype."""

    kappa: float
    """What the step leaves of the parameter."""

    @abstractmethod
    def move(self, weight: Tensor, average: Tensor, gradient: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return W' and m', given W, m and the gradient (nothing for zero)."""


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


M = TypeVar("M", bound=Map | None)


class Backward(ABC, Generic[M]):
    """What multiplies a step's gradient in the final parameter, carried from the last step to the first."""

    @abstractmethod
    def step(self, linear: M) -> Multiplier:
        """Go back over one step, and return its multiplier."""


@dataclass(frozen=True, slots=True)
class Taken:
    """One step that torch's own optimizer has taken: its settings, its gradient, and the state before and after."""

    settings: Settings
    gradient: Tensor
    before: State
    after: State


class Spread(ABC, Generic[M]):
    """How far doubt about the gradients of all steps so far may have carried each element of a parameter."""

    @abstractmethod
    def step(self, linear: M, settings: Settings, doubt: Tensor) -> None:
        """Follow one step, whose gradient is known to within `doubt`, at random, in the parameter's shape."""

    @property
    @abstractmethod
    def size(self) -> Tensor:
        """The standard deviation of each element, in the parameter's shape, float64."""


class Kind(ABC, Generic[M]):
    """One replayed optimizer."""

    family: ClassVar[str]
    """The family's name, and what multiplies a gradient."""

    rounds: ClassVar[bool] = False
    """Whether its steps round more coarsely than the parameter's dtype, so that the rounding is followed as a term."""

    def __init__(self, optimizer: type[Optimizer], average: str | None) -> None:
        self.optimizer = optimizer
        self.average = average  # the state entry that m is

    @abstractmethod
    def make(self, parameter: Tensor) -> Optimizer:
        """Return torch's own optimizer for one parameter."""

    @abstractmethod
    def encode(self, group: Mapping[str, Any]) -> dict[str, Setting]:
        """Return a group's settings as the steps table holds them."""

    @abstractmethod
    def decode(self, row: Mapping[str, Any]) -> Settings:
        """Return a group's settings, from a row of the steps table; the inverse of `encode`."""

    @abstractmethod
    def read(self, taken: Taken) -> M:
        """Return a step as a linear map."""

    @abstractmethod
    def backward(self, shape: Sequence[int]) -> Backward[M]:
        """Return where the way back starts for a parameter of this shape."""

    def spread(self, shape: Sequence[int]) -> Spread[M] | None:
        """Return where doubt about gradients starts from, or None if the optimizer's steps do not amplify it."""
        return None


_KINDS: dict[str, Kind[Any]] = {}


def replays(kind: Kind[Any]) -> None:
    """Register an optimizer as one that is replayed."""
    _KINDS[kind.optimizer.__name__] = kind


def kinds() -> Mapping[str, Kind[Any]]:
    """Return every replayed optimizer by name."""
    return _KINDS


class Share:
    """A part of a parameter that moves on with every step: the start's, a group's, or that of rounding."""

    def __init__(self, weight: Tensor, average: Tensor | None = None) -> None:
        self.weight = weight
        self.average = torch.zeros_like(weight) if average is None else average

    def step(self, linear: Map, gradient: Tensor | None) -> None:
        """Follow one step, given this share's part of the gradient (nothing for none), in float64."""
        self.weight, self.average = linear.move(self.weight, self.average, gradient)


class Replay:
    """One parameter's training again, by torch's own optimizer, on gradients that are handed in."""

    def __init__(self, kind: Kind[Any], parameter: Tensor, state: State) -> None:
        self.kind = kind
        self.parameter = torch.nn.Parameter(parameter.clone())
        self._optimizer = kind.make(self.parameter)
        if state:
            self._optimizer.state[self.parameter].update(_cloned(state))

    @without_gradients
    def step(self, settings: Settings, gradient: Tensor) -> Any:
        """Take one step, and return it as a linear map (the kind's own)."""
        self._optimizer.param_groups[0].update(settings)
        self.parameter.grad = gradient
        before = _cloned(self._optimizer.state[self.parameter])
        self._optimizer.step()
        return self.kind.read(Taken(settings, gradient, before, self.state))

    @property
    def state(self) -> State:
        """The optimizer's state by now."""
        state: State = self._optimizer.state[self.parameter]
        return state

    def share(self) -> Share:
        """Return a copy of the parameter and its average as they are, as one share in float64."""
        average = self.state.get(self.kind.average) if self.kind.average else None
        weight = self.parameter.detach().to(torch.float64, copy=True)
        return Share(weight, None if average is None else average.to(torch.float64, copy=True))

    def copy(self) -> "Replay":
        """Return a replay that stands where this one does."""
        return Replay(self.kind, self.parameter.detach(), copy.deepcopy(dict(self.state)))


def _cloned(state: State) -> dict[str, Any]:
    return {name: entry.clone() if isinstance(entry, Tensor) else entry for name, entry in state.items()}


def near(dtype: torch.dtype) -> Callable[[float], float]:
    """Return the function that rounds a number to a dtype, as a step does with its settings.

    A decay of 1 - 1e-5 is off by 5e-8 in float32: nothing in one step, but the same in all of them.
    """
    return lambda number: float(torch.tensor(number, dtype=dtype))


def machine(device: torch.device) -> str:
    """Return what decides how the same numbers are rounded: the device, its instructions, and the threads on it."""
    if device.type == "cpu":
        return f"cpu {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}"
    return f"cuda {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)
