"""Modules that multiply what they compute from their input by a parameter: recognised by what they compute.

Projects write norms of their own: a layer norm without a bias, one that computes in float32 or over channels that come
first, one with its epsilon behind the root. Whatever f is, a module that computes `factor ⊙ f(x) + shift` is linear in
its parameters, and its key is f(x): what it returns where the factor is 1 and the shift 0. So a copy of the module,
with these as its parameters, computes the keys, and f itself need not be known.

A module is recorded as one if it has no children and no buffers, takes one argument, and copies of it with random
parameters compute `factor ⊙ f(x) + shift` with numbers along one axis, for random inputs, in training and in
evaluation. Any other module is left alone, among them `(1 + factor) ⊙ f(x)`, which is not linear in its factor alone,
and modules that draw random numbers.
"""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from dualform.recording.generators import untouched_generators
from dualform.recording.layers.elementwise_modules import Elementwise
from dualform.recording.layers.layer_kind import recognises
from dualform.recording.layers.module_trials import RANKS, ModuleTrial, tried_parameters
from dualform.recording.sharded_modules import plain_copy
from dualform.torch_modes import without_gradients

TOLERANCE = 1e-5  # relative, of float32: norms round in several places
OTHER_LENGTH = 3  # of the axes of trial inputs that no parameter lies along; 4 where the parameters have 3 elements


class ScaledFunction(Elementwise):
    """z = factor ⊙ f(x) + shift along one axis, for whatever f the module computes."""

    name = "ScaledFunction"
    key_text = (
        "what the module computes with a factor of 1 and no shift, elementwise: any small module of yours that "
        "computes `f(x) * p` or `f(x) * p + b`, such as a norm, with one number per element of one axis; a trial "
        "finds out"
    )

    def __init__(
        self, module: nn.Module, width: int, axes: Mapping[int, int], *, factor: str, shift: str | None
    ) -> None:
        """Describe a module; the arguments after the first are those of `Elementwise`."""
        super().__init__(width, axes, factor=factor, shift=shift)
        self._module, self._neutral = module, {factor: 1.0} if shift is None else {factor: 1.0, shift: 0.0}
        self._copies: dict[tuple[torch.device, torch.dtype], nn.Module] = {}

    @without_gradients
    def keys(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """Return f(x) with the parameters' axis last."""
        parameter = cast("Tensor", getattr(module, next(iter(self._neutral))))
        place = (parameter.device, parameter.dtype)
        if place not in self._copies:
            self._copies[place] = neutral_copy(self._module, self._neutral).to(*place)
        made = self._copies[place].train(module.training)
        # What the program may change meanwhile, such as a temperature; lists and the like stay the copy's own.
        changing = {name: value for name, value in vars(module).items() if name in vars(made) and name[0] != "_"}
        vars(made).update((name, it) for name, it in changing.items() if not isinstance(it, list | dict | set))
        return super().keys(module, made.forward(inputs))


def neutral_copy(module: nn.Module, values: Mapping[str, float]) -> nn.Module:
    """Return a copy of a module in which each of these parameters is filled with its number."""
    found = plain_copy(module)
    for name, value in values.items():
        found.get_parameter(name).data.fill_(value)
    return found.requires_grad_(requires_grad=False)


@recognises(ScaledFunction)
def find_scaled_function(module: nn.Module) -> ScaledFunction | None:
    """Return the kind of a module that computes `factor ⊙ f(x)`, with or without a shift; None for any other."""
    parameters = tried_parameters(module)
    if parameters is None or next(module.buffers(), None) is not None:
        return None
    shapes = {tuple(size for size in parameter.shape if size != 1) for parameter in parameters.values()}
    if len(shapes) != 1 or len(shape := shapes.pop()) != 1:
        return None
    names = list(parameters)
    ways: list[tuple[str, str | None]] = (
        [(names[0], None)] if len(names) == 1 else [(names[0], names[1]), (names[1], names[0])]
    )
    with untouched_generators():
        try:
            for factor, shift in ways:
                axes = _axes(module, shape[0], factor, shift)
                if axes:
                    return ScaledFunction(module, shape[0], axes, factor=factor, shift=shift)
        except Exception:  # a module that cannot be copied is not recognised
            return None
    return None


def _axes(module: nn.Module, width: int, factor: str, shift: str | None) -> dict[int, int]:
    """Return the axis that the parameters lie along, for each number of axes for which the module scales a function."""
    trial = ModuleTrial(module)
    plain = ModuleTrial(neutral_copy(module, {factor: 1.0} if shift is None else {factor: 1.0, shift: 0.0}))
    other = OTHER_LENGTH + 1 if width == OTHER_LENGTH else OTHER_LENGTH

    def expected(inputs: Tensor) -> Tensor | None:
        computed = plain.run(inputs)
        if computed is None:
            return None
        along = [width if size == width else 1 for size in inputs.shape]
        scaled = computed * trial.parameters[factor].reshape(along)
        return scaled if shift is None else scaled + trial.parameters[shift].reshape(along)

    return {
        rank: axis
        for rank in RANKS
        for axis in range(rank)
        if trial.computes(expected, [*[other] * axis, width, *[other] * (rank - 1 - axis)], tolerance=TOLERANCE)
    }
