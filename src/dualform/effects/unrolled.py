"""The exact derivative of a training's end by each sample's weight, found backwards through the steps.

A step takes the parameters W, the optimizer's state s and the gradient g of the batch's loss (1/B) Σ w_i ℓ_i(W), w = 1:

    (W', s') = update(W, s, g)          g = (1/B) Σ w_i ∂ℓ_i/∂W

With a = ∂f/∂W' and b = ∂f/∂s' of a quantity f at the end of the training, one step back gives

    (p, q, r) = (a, b) · ∂update/∂(W, s, g)          a ← p + ∂⟨r, g⟩/∂W          b ← q          ∂f/∂w_i = ∂⟨r, g⟩/∂w_i

The update is torch's own optimizer with `differentiable=True`, second moments and all; ⟨r, g⟩ is differentiated through
a second backward of the batch's loss. Nothing is approximated. What each step did is compared with what is
differentiated, and a step that did anything else is refused.
"""

import contextlib
import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import SGD, Optimizer

from dualform.engine.walk_back import GroupUpdate, ParameterState, RetracedStep
from dualform.errors import QueryError
from dualform.torch_modes import with_gradients

TOLERANCE = 1e-3
"""How far the gradient of the losses, and the step that is differentiated, may be from those that were taken; relative.

Rounding leaves 1e-6 in float32; attention's other kernels, which have a second derivative, some 1e-5.
"""

SMALL_PART = 1e-3
"""A parameter's gradient is compared relative to its own norm, but to no less than this part of the whole norm."""

CLIPPING_EPSILON = 1e-6
"""What `torch.nn.utils.clip_grad_norm_` adds to the norm."""

TOGETHER_ELEMENTS = 1 << 16
"""The most elements of all inputs for which several adjoints are pulled back together on a CPU.

On one thread, 20 adjoints of an MLP with 6,000 weights take 2 ms together and 7 ms one by one; of one with 84,000
weights 14 ms either way; and of one with a million 512 and 125 ms.
"""

COUNTERS = ("step", "mu_product")
"""Entries of an optimizer's state that count steps, and depend on no gradient."""

OVERRIDES = {"differentiable": True, "foreach": False, "fused": False, "capturable": False}


@dataclass(slots=True, eq=False)
class Adjoint:
    """The derivative of M quantities by the parameters and the optimizer's state between two steps.

    Attributes:
        parameters: (M, ...) for each parameter.
        states: (M, ...) for each parameter and each tensor of its state that was asked for so far.
        gradient_error: the largest relative difference so far between a step's gradient and that of the losses.
        step_error: the largest relative difference so far between what a step did and what is differentiated.
    """

    parameters: list[Tensor]
    states: list[dict[str, Tensor]]
    gradient_error: float = 0.0
    step_error: float = 0.0
    _buffers: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def at_end(cls, gradients: Sequence[Tensor]) -> "Adjoint":
        """Begin at the end of the training with the quantities' gradients, (M, ...) for each parameter."""
        return cls(list(gradients), [{} for _ in gradients])

    @with_gradients
    def step_back(self, step: RetracedStep) -> Tensor:
        """Go back over one step, and return the derivative of each quantity by the weight of each sample, (M, B)."""
        self._require_same_buffers(step)
        with _second_derivatives():
            weights, gradients, taken = self._batch_gradients(step)
            self._require_same_gradients(step, gradients)
            by_gradient = self._through_update(step)
            wanted = [by_gradient[place] for place in taken]
            found = _named_errors(
                step,
                lambda: pull_back(
                    [gradients[place] for place in taken], [*(step.parameters[p] for p in taken), weights], wanted
                ),
            )
        for place, more in zip(taken, found[:-1], strict=True):
            self.parameters[place] = self.parameters[place] + more
        return found[-1]

    def _batch_gradients(self, step: RetracedStep) -> tuple[Tensor, dict[int, Tensor], list[int]]:
        """Return the samples' weights, and the gradients of the weighted loss with a graph, by place."""
        losses = step.losses()
        if not isinstance(losses, Tensor) or losses.dim() != 1 or not losses.is_floating_point():
            came = (
                f"{losses.dtype} {tuple(losses.shape)}" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
            )
            raise QueryError(f"loss(model, batch) returned {came}; expected the loss of each sample, a tensor (B,).")
        if not losses.requires_grad:
            raise QueryError("loss(model, batch) does not depend on the parameters: is it computed without gradients?")
        weights = torch.ones_like(losses, requires_grad=True)
        taken = [place for place, gradient in enumerate(step.gradients) if gradient is not None]
        found = torch.autograd.grad(
            (losses * weights).sum() / len(losses),
            [step.parameters[place] for place in taken],
            create_graph=True,
            allow_unused=True,
        )
        gradients = {
            place: torch.zeros_like(step.parameters[place]) if one is None else one
            for place, one in zip(taken, found, strict=True)
        }
        if step.max_norm is not None:
            gradients = _clipped(gradients, step.max_norm)
        return weights, gradients, taken

    def _require_same_gradients(self, step: RetracedStep, gradients: Mapping[int, Tensor]) -> None:
        """Raise unless the gradients of the losses are those that the optimizer took."""
        taken = {place: step.gradients[place] for place in gradients}
        norms = {place: float(one.double().norm()) for place, one in taken.items() if one is not None}
        whole = sum(norm**2 for norm in norms.values()) ** 0.5
        if not whole:
            return
        worst, worst_place, product, square = 0.0, -1, 0.0, 0.0
        for place, mine in gradients.items():
            theirs = step.gradients[place]
            assert theirs is not None, "only gradients that were taken are computed"
            apart = float((mine.detach().double() - theirs.double()).norm())
            relative = apart / max(norms[place], SMALL_PART * whole)
            product += float((mine.detach().double() * theirs.double()).sum())
            square += float(mine.detach().double().square().sum())
            if not relative <= worst:
                worst, worst_place = relative, place
        self.gradient_error = max(self.gradient_error, worst)
        if worst <= TOLERANCE:
            return
        factor = product / square if square else float("nan")
        raise QueryError(
            f"In step {step.number} the gradient of the mean of loss(model, batch) is not the one that the step took: "
            f"that of {step.names[worst_place]!r} is off by {worst:.1e} of its size, and over all parameters the "
            f"step's is {factor:.4g} times it. Give the losses that the step minimised: a sum in place of a mean is B "
            "times as large; a part of the loss that no sample has (a penalty) belongs to none; a norm that "
            "clip_grad_norm_ holds the gradient to is given as Restartable(max_norm=...)."
        )

    def _through_update(self, step: RetracedStep) -> list[Tensor]:
        """Pull the adjoint back through the optimizer; return what it makes of the gradients, (M, ...) for each."""
        by_gradient = [torch.zeros_like(one) for one in self.parameters]
        for update in step.updates:
            for places in _by_freshness(update, step):
                self._through_group(step, update, places, by_gradient)
        return by_gradient

    def _through_group(
        self, step: RetracedStep, update: GroupUpdate, places: Sequence[int], by_gradient: list[Tensor]
    ) -> None:
        """Pull the adjoint of some parameters back through their optimizer's step."""
        parameters = [_leaf(step.parameters[place]) for place in places]
        gradients = [_leaf(_taken(step, place)) for place in places]
        states = [_state_leaves(step.states[place], step.parameters[place]) for place in places]
        moved, left = differentiable_update(update, parameters, states, gradients)
        self._require_same_step(step, places, moved, left)
        outputs, adjoints, inputs = list(moved), [self.parameters[place] for place in places], [*parameters, *gradients]
        for place, state, entries in zip(places, states, left, strict=True):
            inputs += state.leaves.values()
            for name, entry in entries.items():
                if name in self.states[place]:
                    outputs.append(entry)
                    adjoints.append(self.states[place][name])
        found = iter(pull_back(outputs, inputs, adjoints))
        for place in places:
            self.parameters[place] = next(found)
        for place in places:
            by_gradient[place] = next(found)
        for place, state in zip(places, states, strict=True):
            self.states[place] = {name: next(found) for name in state.leaves}

    def _require_same_step(
        self,
        step: RetracedStep,
        places: Sequence[int],
        moved: Sequence[Tensor],
        left: Sequence[Mapping[str, Tensor]],
    ) -> None:
        """Raise unless the step that is differentiated leads where the recorded one did."""
        for place, parameter, entries in zip(places, moved, left, strict=True):
            pairs = [("", step.parameters[place].detach(), parameter, step.after[place])]
            before, after = step.states[place], step.states_after[place]
            for name, entry in entries.items():
                if isinstance(after.get(name), Tensor):
                    start = before.get(name)
                    start = start if isinstance(start, Tensor) else torch.zeros_like(entry)
                    pairs.append((name, start, entry, after[name]))
            for name, start, mine, theirs in pairs:
                error = _step_error(start, mine.detach(), theirs)
                self.step_error = max(self.step_error, error)
                if not error <= TOLERANCE:
                    what = f"the optimizer's {name} of {step.names[place]!r}" if name else f"{step.names[place]!r}"
                    raise QueryError(
                        f"In step {step.number} {what} changed otherwise than the optimizer's own step changes it, by "
                        f"{error:.1e} of the change. Unrolled effects need a training whose parameters and optimizer "
                        "state nothing but the optimizer changes."
                    )

    def _require_same_buffers(self, step: RetracedStep) -> None:
        """Raise where a buffer changes while the model trains: it carries something on that is not differentiated."""
        for name, buffer in step.buffers.items():
            if name in self._buffers and not torch.equal(self._buffers[name], buffer):
                raise QueryError(
                    f"The buffer {name!r} changes while the model trains (running statistics of BatchNorm?). What it "
                    "carries from step to step is not differentiated: put that layer into eval mode before training, "
                    "or ask effects() without method."
                )
            self._buffers[name] = buffer.detach().clone()


@dataclass(frozen=True, slots=True, eq=False)
class StateLeaves:
    """An optimizer's state of one parameter, ready to be differentiated by.

    Attributes:
        entries: the whole state; counters in float64, so that powers of betas are not rounded.
        leaves: the tensors of the parameter's shape, which the step's result depends on.
    """

    entries: ParameterState
    leaves: Mapping[str, Tensor]


def differentiable_update(
    update: GroupUpdate, parameters: Sequence[Tensor], states: Sequence[StateLeaves], gradients: Sequence[Tensor]
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Take an optimizer's step so that its result can be differentiated by all that goes into it.

    Args:
        update: the optimizer and its settings.
        parameters: the parameters before the step.
        states: what the optimizer kept of each.
        gradients: the gradient of each.

    Returns the parameters after the step, and the tensors of their shapes in the optimizer's state.
    """
    moved = [parameter.clone() for parameter in parameters]
    for parameter in moved:
        parameter.retain_grad()  # torch warns of the gradient of a tensor in a graph otherwise
    settings: dict[str, Any] = {**update.settings, **OVERRIDES}
    optimizer: Optimizer = update.optimizer(moved, differentiable=True)  # type: ignore[call-arg]
    group = optimizer.param_groups[0]
    group.update({name: value for name, value in settings.items() if name in group})
    begins_buffer = update.optimizer is SGD and bool(settings.get("momentum")) and not states[0].leaves
    if begins_buffer:
        group["dampening"] = 0.0  # torch's first buffer is the gradient itself, but cut off from the graph
    for parameter, state, gradient in zip(moved, states, gradients, strict=True):
        entries = {name: entry.clone() if isinstance(entry, Tensor) else entry for name, entry in state.entries.items()}
        if begins_buffer:
            entries = {"momentum_buffer": torch.zeros_like(gradient)}
        if entries:
            optimizer.state[parameter].update(entries)
        parameter.grad = gradient if update.optimizer is SGD else gradient + _off_zero(gradient)
    _step_in_double(optimizer)
    left = []
    for parameter in moved:
        entries = optimizer.state.get(parameter, {})
        left.append({name: one for name, one in entries.items() if name not in COUNTERS and _is_like(one, parameter)})
    return moved, left


def _step_in_double(optimizer: Optimizer) -> None:
    """Take a step; counters that it begins are float64, as torch makes them where that is the default dtype."""
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        optimizer.step()
    finally:
        torch.set_default_dtype(before)


def _off_zero(gradient: Tensor) -> Tensor:
    """Return a tiny number where a gradient is zero: the root of a second moment has no derivative at zero.

    The number is far below what adds anything to a moment; where all moments are zero, the derivative through the
    second one is the zero that it tends to.
    """
    tiny = 1e-100 if gradient.dtype == torch.float64 else 1e-16
    return torch.where(gradient == 0, tiny, 0.0).to(gradient.dtype)


def pull_back(outputs: Sequence[Tensor], inputs: Sequence[Tensor], adjoints: Sequence[Tensor]) -> list[Tensor]:
    """Return Σ adjoint · ∂output/∂input, (M, ...) for each input, of M adjoints (M, ...) for each output."""
    many = len(adjoints[0])
    pairs = [(one, adjoint) for one, adjoint in zip(outputs, adjoints, strict=True) if one.requires_grad]
    if not pairs:
        return [one.new_zeros(many, *one.shape) for one in inputs]
    wanted, given = [one for one, _ in pairs], [adjoint.to(one.dtype) for one, adjoint in pairs]

    def one_by_one() -> list[Tensor]:
        rows = []
        for at in range(many):
            row = torch.autograd.grad(wanted, inputs, [g[at] for g in given], retain_graph=True, allow_unused=True)
            rows.append([torch.zeros_like(x) if r is None else r for x, r in zip(inputs, row, strict=True)])
        return [torch.stack(each) for each in zip(*rows, strict=True)]

    small = sum(one.numel() for one in inputs) <= TOGETHER_ELEMENTS
    if many == 1 or not (small or wanted[0].is_cuda):
        return one_by_one()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")
            found = torch.autograd.grad(
                wanted, inputs, given, retain_graph=True, allow_unused=True, is_grads_batched=True
            )
    except RuntimeError:  # an operation that torch cannot do for several adjoints at once, or too little memory
        return one_by_one()
    return [x.new_zeros(many, *x.shape) if one is None else one for x, one in zip(inputs, found, strict=True)]


def _clipped(gradients: Mapping[int, Tensor], max_norm: float) -> dict[int, Tensor]:
    """Return gradients as `torch.nn.utils.clip_grad_norm_` leaves them, all of them together."""
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(one) for one in gradients.values()]))
    factor = (max_norm / (norm + CLIPPING_EPSILON)).clamp(max=1.0)
    return {place: one * factor for place, one in gradients.items()}


def _by_freshness(update: GroupUpdate, step: RetracedStep) -> Iterator[list[int]]:
    """Yield the group's parameters that took a gradient: those without any state before the step, then the others."""
    require_differentiable(update.optimizer)
    taken = [place for place in update.places if step.gradients[place] is not None]
    for fresh in (True, False):
        mine = [place for place in taken if fresh != any(isinstance(x, Tensor) for x in step.states[place].values())]
        if mine:
            yield mine


def require_differentiable(optimizer: type[Optimizer]) -> None:
    """Raise unless torch can differentiate through an optimizer's steps."""
    differentiable = "differentiable" in inspect.signature(optimizer).parameters
    if not differentiable or not optimizer.__module__.startswith("torch.optim"):
        raise QueryError(
            f"Unrolled effects go backwards through the optimizer's steps, and torch cannot differentiate those of "
            f"{optimizer.__name__}. It can those of SGD, Adam, AdamW, NAdam, RAdam, Adamax, RMSprop, Adagrad and "
            "Adadelta. Ask effects() without method."
        )


def _taken(step: RetracedStep, place: int) -> Tensor:
    found = step.gradients[place]
    assert found is not None, "only parameters that took a gradient are asked for it"
    return found


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def _is_like(entry: Any, parameter: Tensor) -> bool:
    """Say whether a state's entry is a tensor of numbers, one for each element of the parameter."""
    return isinstance(entry, Tensor) and entry.shape == parameter.shape and entry.is_floating_point()


def _state_leaves(state: ParameterState, parameter: Tensor) -> StateLeaves:
    leaves = {
        name: _leaf(entry) for name, entry in state.items() if name not in COUNTERS and _is_like(entry, parameter)
    }
    rest = {
        name: entry.detach().double() if isinstance(entry, Tensor) and entry.is_floating_point() else entry
        for name, entry in state.items()
        if name not in leaves and entry is not None
    }
    return StateLeaves({**rest, **leaves}, leaves)


def _step_error(start: Tensor, mine: Tensor, theirs: Tensor) -> float:
    """Return how far a step's result is from another's, relative to the change; rounding of the result is no error."""
    wide, other = mine.double(), theirs.double()
    rounding = 4 * torch.finfo(theirs.dtype).eps * float(other.norm())
    apart = max(0.0, float((wide - other).norm()) - rounding)
    change = float((other - start.double()).norm())
    return apart / change if change else (0.0 if not apart else float("inf"))


@contextlib.contextmanager
def _second_derivatives() -> Iterator[None]:
    """Let attention and recurrent layers use kernels that have a second derivative."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if torch.cuda.is_available():
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield


def _named_errors(step: RetracedStep, call: Any) -> list[Tensor]:
    """Call, and say by name where an operation of the model has no second derivative."""
    try:
        found: list[Tensor] = call()
    except RuntimeError as error:
        if "not implemented" not in str(error):
            raise
        raise QueryError(
            f"An operation of the model has no second derivative in torch, which unrolled effects need: {error} "
            f"(step {step.number}). Use another kernel for it inside of loss(model, batch)."
        ) from error
    return found
