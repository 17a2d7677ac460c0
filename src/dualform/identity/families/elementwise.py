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

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dualform.identity.families.optimizer_kind import (
    AskedOutputs,
    AskedRecursion,
    BackwardRecursion,
    DoubtfulStep,
    Move,
    Multiplier,
    OptimizerKind,
    ReplayedStep,
    Setting,
    Settings,
    Spread,
    State,
    StepMap,
    StepMatrix,
    register_optimizer,
)
from dualform.identity.families.rounding import near
from dualform.identity.parameter_maps import ParameterMap


@dataclass(frozen=True, slots=True)
class ElementwiseStep(StepMap):
    """One step, as the numbers and matrices of the three lines above; SGD's are numbers throughout."""

    alpha: float = 0.0
    beta: Tensor | float = 0.0
    kappa: float = 1.0
    on_average: Tensor | float = 0.0  # P
    on_gradient: Tensor | float = 0.0  # Q
    decay: float = 0.0
    sign: float = 1.0
    reach: float = 1.0  # how far one gradient moves an element at most, over all steps, in learning rates
    corrected: float = 0.0  # steps t by which the average is divided by 1 − αᵗ; 0 where it is not

    def step(self, share: Tensor, average: Tensor, gradient: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return a share of W' and of m'."""
        if gradient is None:
            moved = self.decay * share if self.decay else None
        else:
            moved = self.sign * gradient
            if self.decay:
                moved = moved + self.decay * share
        average = self.alpha * average
        if moved is not None:
            average = average + self.beta * moved
        after = self.kappa * share - self.on_average * average
        return (after if moved is None else after - self.on_gradient * moved), average

    @property
    def moves_average(self) -> bool:
        """Whether a step changes the average."""
        return self.alpha != 1.0 or isinstance(self.beta, Tensor) or self.beta != 0.0

    @property
    def matrix(self) -> StepMatrix | None:
        """The step as numbers; None where one of β, P, Q is a matrix."""
        if isinstance(self.on_average, Tensor) or isinstance(self.on_gradient, Tensor) or isinstance(self.beta, Tensor):
            return None
        beta, on_average, on_gradient = (float(x) for x in (self.beta, self.on_average, self.on_gradient))
        direct = on_average * beta + on_gradient  # what W' takes of d
        return StepMatrix(
            weight=(self.kappa - direct * self.decay, -on_average * self.alpha),
            average=(beta * self.decay, self.alpha),
            gradient=(-direct * self.sign, beta * self.sign),
        )

    @property
    def lerp(self) -> tuple[float, float] | None:
        """α and sign · β, where β is a number and the step takes d by way of the average alone, without decay."""
        if isinstance(self.beta, Tensor) or isinstance(self.on_gradient, Tensor) or self.on_gradient or self.decay:
            return None
        return self.alpha, self.sign * self.beta

    @classmethod
    def follow_all(cls, moves: Sequence[Move["ElementwiseStep"]]) -> None:
        """Move all shares in place: those whose steps have the same numbers by one kernel for each product."""
        alike: dict[tuple[Any, ...], list[Move[ElementwiseStep]]] = {}
        numbers: tuple[Any, ...] = ()
        last: ElementwiseStep | None = None
        for move in moves:
            step = move.linear
            if step is not last:
                last = step
                numbers = (
                    step.alpha,
                    step.kappa,
                    step.decay,
                    step.sign,
                    "matrix" if isinstance(step.beta, Tensor) else step.beta,
                    "matrix" if isinstance(step.on_average, Tensor) else step.on_average,
                    "matrix" if isinstance(step.on_gradient, Tensor) else step.on_gradient,
                )
            # Kernels for many tensors take no matrix that stands for several shares of one tensor.
            stacked = isinstance(step.on_average, Tensor) and move.shares[0].dim() != step.on_average.dim()
            alike.setdefault((*numbers, move.averages_moved, move.scale, stacked), []).append(move)
        for group in alike.values():
            _follow_together(group)

    def bias_correction(self, alpha: float) -> float:
        """Return 1 − αᵗ where the step divides the average by it."""
        return 1 - alpha**self.corrected if self.corrected else 1.0


def _follow_together(moves: Sequence[Move[ElementwiseStep]]) -> None:
    """Follow steps that are alike but for their matrices."""
    first = moves[0].linear
    shares = [share for move in moves for share in move.shares]
    averages = [average for move in moves for average in move.averages]
    owners = [move.linear for move in moves for _ in move.shares]
    gradients = [gradient for move in moves for gradient in move.gradients]
    places = [place for place, gradient in enumerate(gradients) if gradient is not None]
    moved = [gradient for gradient in gradients if gradient is not None]
    if first.decay:
        decayed = list(torch._foreach_mul(shares, first.decay))
        if moved:
            torch._foreach_add_([decayed[place] for place in places], moved, alpha=first.sign)
        moved, places = decayed, list(range(len(shares)))
    elif first.sign != 1.0 and moved:
        moved = list(torch._foreach_mul(moved, first.sign))
    with_gradient = [owners[place] for place in places]
    if first.moves_average and not moves[0].averages_moved:
        _move_averages(averages, places, moved, [one.beta for one in with_gradient], first.alpha)
    scale = moves[0].scale
    if scale is None and first.kappa != 1.0:
        torch._foreach_mul_(shares, first.kappa)
    _add_products(shares, averages, [one.on_average for one in owners], by=-1 / (scale or 1.0))
    _add_products([shares[place] for place in places], moved, [one.on_gradient for one in with_gradient], by=-1.0)


def _move_averages(
    averages: list[Tensor], places: Sequence[int], moved: list[Tensor], betas: Sequence[Tensor | float], alpha: float
) -> None:
    """Multiply averages by α, and add β times what moved those at some places: as one lerp where α is 1 − β."""
    taking = [averages[place] for place in places]
    if moved and not isinstance(betas[0], Tensor) and alpha == 1 - betas[0]:
        torch._foreach_lerp_(taking, moved, betas[0])
        here = set(places)
        averages, moved = [one for place, one in enumerate(averages) if place not in here], []
    if averages and alpha != 1.0:
        torch._foreach_mul_(averages, alpha)
    _add_products(taking, moved, betas)


def _is_not_zero(factor: Tensor | float) -> bool:
    return isinstance(factor, Tensor) or factor != 0.0


def _add_products(
    totals: list[Tensor], terms: list[Tensor], factors: Sequence[Tensor | float], *, by: float = 1.0
) -> None:
    """Add each term times a factor and a number to its total, in place; factors are all matrices, or all one number."""
    if not terms or not _is_not_zero(factors[0]):
        return
    matrices = [factor for factor in factors if isinstance(factor, Tensor)]
    if matrices:
        torch._foreach_addcmul_(totals, terms, matrices, value=by)
    else:
        torch._foreach_add_(totals, terms, alpha=by * float(factors[0]))


Reading = Callable[[Settings, State, State], ElementwiseStep]
ReadingTogether = Callable[[Sequence[tuple[Settings, State]]], list[ElementwiseStep]]
"""Reads the steps of several parameters off their settings and their states after the step."""


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


def _sign(settings: Settings) -> float:
    return -1.0 if settings["maximize"] else 1.0


def _adam(settings: Settings, after: State, *, decoupled: bool) -> ElementwiseStep:
    beta1, beta2 = settings["betas"]
    count = float(after["step"])
    denominator = _adam_second(settings, after).sqrt() / (1 - beta2**count) ** 0.5 + settings["eps"]
    return _adam_step(settings, count, settings["lr"] / (1 - beta1**count) / denominator, decoupled=decoupled)


def _adam_second(settings: Settings, after: State) -> Tensor:
    found: Tensor = after["max_exp_avg_sq"] if settings["amsgrad"] else after["exp_avg_sq"]
    return found


def _adam_step(settings: Settings, count: float, on_average: Tensor, *, decoupled: bool) -> ElementwiseStep:
    """Return a step of Adam, given how many steps there were and what it multiplies its average with."""
    beta1, _ = settings["betas"]
    decay, lr = settings["weight_decay"], settings["lr"]
    return ElementwiseStep(
        alpha=beta1,
        beta=1 - beta1,
        kappa=1 - lr * decay if decoupled else 1.0,
        on_average=on_average,
        decay=0.0 if decoupled else decay,
        sign=_sign(settings),
        corrected=count,
    )


def _adam_together(taken: Sequence[tuple[Settings, State]]) -> list[ElementwiseStep]:
    """Read steps of Adam or AdamW as `_adam` does, by the same kernels for all parameters with the same settings."""
    counts = [float(after["step"]) for _, after in taken]
    alike: dict[tuple[Any, ...], list[int]] = {}
    for place, ((settings, after), count) in enumerate(zip(taken, counts, strict=True)):
        second = _adam_second(settings, after)
        alike.setdefault((count, second.dtype, second.device, id(settings)), []).append(place)
    found: dict[int, ElementwiseStep] = {}
    for places in alike.values():
        settings, count = taken[places[0]][0], counts[places[0]]
        beta1, beta2 = settings["betas"]
        factors = torch._foreach_sqrt([_adam_second(*taken[place]) for place in places])
        torch._foreach_div_(factors, (1 - beta2**count) ** 0.5)
        torch._foreach_add_(factors, settings["eps"])
        torch._foreach_reciprocal_(factors)
        torch._foreach_mul_(factors, settings["lr"] / (1 - beta1**count))
        decoupled = settings.get("decoupled_weight_decay", True)  # AdamW's is always
        for place, factor in zip(places, factors, strict=True):
            found[place] = _adam_step(settings, count, factor, decoupled=decoupled)
    return [found[place] for place in range(len(taken))]


_ADAM = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")


@reads(
    torch.optim.Adam,
    *_ADAM,
    "decoupled_weight_decay",
    average="exp_avg",
    state_settings=("amsgrad",),
    by_average=True,
    together=_adam_together,
)
def _read_adam(settings: Settings, before: State, after: State) -> ElementwiseStep:
    return _adam(settings, after, decoupled=settings["decoupled_weight_decay"])


@reads(
    torch.optim.AdamW,
    *_ADAM,
    average="exp_avg",
    state_settings=("amsgrad",),
    decoupled=True,
    by_average=True,
    together=_adam_together,
)
def _read_adamw(settings: Settings, before: State, after: State) -> ElementwiseStep:
    return _adam(settings, after, decoupled=True)


@reads(
    torch.optim.NAdam,
    "lr", "betas", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay", "maximize",
    average="exp_avg",
)  # fmt: skip
def _read_nadam(settings: Settings, before: State, after: State) -> ElementwiseStep:
    beta1, beta2 = settings["betas"]
    count, lr, decay = float(after["step"]), settings["lr"], settings["weight_decay"]
    momentum, following = (beta1 * (1 - 0.5 * 0.96 ** (at * settings["momentum_decay"])) for at in (count, count + 1))
    product = float(after["mu_product"])
    denominator = (after["exp_avg_sq"] / (1 - beta2**count)).sqrt() + settings["eps"]
    decoupled = settings["decoupled_weight_decay"]
    return ElementwiseStep(
        alpha=beta1,
        beta=1 - beta1,
        kappa=1 - lr * decay if decoupled else 1.0,
        on_average=lr * following / (1 - product * following) / denominator,
        on_gradient=lr * (1 - momentum) / (1 - product) / denominator,  # NAdam's factors follow no one α: uncorrected
        decay=0.0 if decoupled else decay,
        sign=_sign(settings),
    )


@reads(
    torch.optim.RAdam,
    "lr", "betas", "eps", "weight_decay", "decoupled_weight_decay", "maximize",
    average="exp_avg",
    by_average=True,
)  # fmt: skip
def _read_radam(settings: Settings, before: State, after: State) -> ElementwiseStep:
    beta1, beta2 = settings["betas"]
    count, lr, decay = float(after["step"]), settings["lr"], settings["weight_decay"]
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * count * beta2**count / (1 - beta2**count)
    rate: Tensor | float = lr / (1 - beta1**count)
    if length > 5:
        ratio = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        adapted = (1 - beta2**count) ** 0.5 / (after["exp_avg_sq"].sqrt() + settings["eps"])
        rate = rate * ratio**0.5 * adapted
    decoupled = settings["decoupled_weight_decay"]
    return ElementwiseStep(
        alpha=beta1,
        beta=1 - beta1,
        kappa=1 - lr * decay if decoupled else 1.0,
        on_average=rate,
        decay=0.0 if decoupled else decay,
        sign=_sign(settings),
        corrected=count,
    )


@reads(torch.optim.Adamax, "lr", "betas", "eps", "weight_decay", "maximize", average="exp_avg", by_average=True)
def _read_adamax(settings: Settings, before: State, after: State) -> ElementwiseStep:
    beta1, _ = settings["betas"]
    count = float(after["step"])
    rate = settings["lr"] / (1 - beta1**count)
    return ElementwiseStep(
        alpha=beta1,
        beta=1 - beta1,
        on_average=rate / after["exp_inf"],
        decay=settings["weight_decay"],
        sign=_sign(settings),
        corrected=count,
    )


@reads(
    torch.optim.RMSprop,
    "lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize",
    average="momentum_buffer",
    state_settings=("centered", "momentum"),
)  # fmt: skip
def _read_rmsprop(settings: Settings, before: State, after: State) -> ElementwiseStep:
    square = after["square_avg"]
    if settings["centered"]:
        square = square - after["grad_avg"].square()
    inverse = 1 / (square.sqrt() + settings["eps"])
    remembered = (1 - settings["alpha"]) ** 0.5 * (1 - settings["momentum"])
    reach = 1 / remembered if remembered else math.inf
    common = {"decay": settings["weight_decay"], "sign": _sign(settings), "reach": reach}
    if settings["momentum"] > 0:
        return ElementwiseStep(alpha=settings["momentum"], beta=inverse, on_average=settings["lr"], **common)
    return ElementwiseStep(on_gradient=settings["lr"] * inverse, **common)


@reads(torch.optim.Adagrad, "lr", "lr_decay", "eps", "weight_decay", "maximize")
def _read_adagrad(settings: Settings, before: State, after: State) -> ElementwiseStep:
    rate = settings["lr"] / (1 + (float(after["step"]) - 1) * settings["lr_decay"])
    scaled = rate / (after["sum"].sqrt() + settings["eps"])
    return ElementwiseStep(on_gradient=scaled, decay=settings["weight_decay"], sign=_sign(settings))


@reads(torch.optim.Adadelta, "lr", "rho", "eps", "weight_decay", "maximize", overwrites_state=("acc_delta",))
def _read_adadelta(settings: Settings, before: State, after: State) -> ElementwiseStep:
    eps = settings["eps"]
    deviation = (after["square_avg"] + eps).sqrt()
    travelled = before["acc_delta"] if "acc_delta" in before else torch.zeros_like(deviation)
    scaled = settings["lr"] * (travelled + eps).sqrt() / deviation
    return ElementwiseStep(on_gradient=scaled, decay=settings["weight_decay"], sign=_sign(settings))
