"""Trials of small modules: what does a copy of a module compute, for random inputs and parameters?

`ModuleTrial` is the copy, `TriedKind` what kinds that were found by trials have in common. What is tried, and which
kind a module turns out to be, is said in `elementwise_modules` and `scaled_functions`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dualform.errors import RefusedError
from dualform.recording.layers.layer_kind import LayerKind, takes_one_input
from dualform.recording.sharded_modules import plain_copy
from dualform.torch_modes import without_gradients

MAX_ELEMENTS = 1 << 21  # of a parameter whose module is tried: a trial of that many takes about a second
RANKS = (1, 2, 3, 4, 5)  # numbers of axes of the trial inputs
SCALES = (
    (1.0, 1.0),
    (1e3, 1e-2),
    (1e-2, 1e3),
)  # of trial inputs and parameters; a bound of either shows in one of them
TOLERANCE = 1e-6  # relative, of float32


def tried_parameters(module: nn.Module) -> dict[str, Tensor] | None:
    """Return the parameters of a module that is small enough to be tried; None for any other.

    It has no children, one parameter or two, each of more than one element, and its `forward` takes one argument.
    """
    parameters: dict[str, Tensor] = dict(module.named_parameters())
    if not 1 <= len(parameters) <= 2 or next(module.children(), None) is not None:
        return None
    if any(is_lazy(one) or not 1 < one.numel() <= MAX_ELEMENTS for one in parameters.values()):
        return None
    return parameters if takes_one_input(module) else None


class TriedKind(LayerKind):
    """A kind that a trial has found for one module; knows the numbers of axes that the trial's inputs had."""

    own_order = True
    ranks: tuple[int, ...]

    def inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """Return the only argument; one with a number of axes that was not tried, or did not work, is refused."""
        given = cast("Tensor", args[0] if args else next(iter(kwargs.values())))
        if given.dim() not in self.ranks:
            raise RefusedError(
                f"A module that was recognised as {self.name} for inputs of {' or '.join(map(str, self.ranks))} axes "
                f"got one of shape {tuple(given.shape)}. Leave the layer out of layers=[...]."
            )
        return given


class ModuleTrial:
    """A copy of a module, to be run with random parameters and inputs on the CPU.

    Attributes:
        parameters: the copy's parameters as they are drawn for the run that is being compared.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = plain_copy(module).cpu().float()
        self._own = dict(self._module.named_parameters())
        self._generator = torch.Generator().manual_seed(0)
        self.parameters: dict[str, Tensor] = {}

    def accepts(self, shape: Sequence[int]) -> bool:
        """Say whether the module returns a tensor of the same shape for an input of this shape."""
        return self.run(self._draw(shape)) is not None

    def computes(
        self, expected: Callable[[Tensor], Tensor | None], shape: Sequence[int], *, tolerance: float = TOLERANCE
    ) -> bool:
        """Say whether the module computes a function of its input, in both modes and at all scales, for this shape."""
        for of_inputs, of_parameters in SCALES:
            inputs = self._draw(shape).mul_(of_inputs)
            self.parameters = {name: self._draw(old.shape).mul_(of_parameters) for name, old in self._own.items()}
            for name, parameter in self._own.items():
                parameter.data.copy_(self.parameters[name])
            wanted = expected(inputs)
            if wanted is None:
                return False
            for training in (True, False):
                self._module.train(training)
                found = self.run(inputs)
                if found is None or not torch.allclose(found, wanted, rtol=tolerance, atol=tolerance * of_parameters):
                    return False
        return True

    def _draw(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(*shape, generator=self._generator, dtype=torch.float32, device="cpu")

    @without_gradients
    def run(self, inputs: Tensor) -> Tensor | None:
        """Return the module's output, or None where it fails, changes its input, or returns another shape or dtype."""
        given = inputs.clone()
        try:
            found = self._module.forward(given)  # and none of the hooks, which a copy keeps
        except Exception:
            return None
        same = isinstance(found, Tensor) and found.shape == inputs.shape and found.dtype == inputs.dtype
        return found if same and torch.equal(given, inputs) else None
