"""Root-mean-square norms of other packages: recognised by what they compute, not by their class.

Language models bring RMSNorm classes of their own (LlamaRMSNorm and its kin, T5LayerNorm). A module is recorded as one
if its class says RMSNorm or LayerNorm, its only parameter is a weight with one axis, and a copy of it computes
`weight · x / rms(x)` for random inputs and weights. A class that computes anything else, such as
`(1 + weight) · x / rms(x)`, or one that takes the mean off, is left alone.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from dualform.recording.generators import untouched_generators
from dualform.recording.layers.layer_kind import recognises, takes_one_input
from dualform.recording.layers.norms import Norm
from dualform.recording.sharded_modules import plain_copy
from dualform.torch_modes import without_gradients

EPSILON_NAMES = ("variance_epsilon", "eps", "epsilon")
TOLERANCE = 1e-5  # relative; such classes compute in float32, whatever their inputs are
CLASS_NAMES = ("RMSNorm", "LayerNorm")  # one of which is part of the name of a class that is tried
SCALES = (1.0, 1e-3)  # of trial inputs; with the smaller one the epsilon shows


class OtherRMSNorm(Norm):
    """Mean square 1 over the last axis, with an epsilon under the root."""

    name = "RMSNorm"

    def __init__(self, epsilon: float) -> None:
        self._epsilon = epsilon

    def keys(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """Return the normalised input."""
        return self.normalise(module, inputs)

    def values(self, module: nn.Module, inputs: Tensor, error: Tensor) -> Tensor:
        """Return the error."""
        return error.reshape(inputs.shape)

    def normalise(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """Return the normalised input."""
        return functional.rms_norm(inputs, inputs.shape[-1:], eps=self._epsilon)


@recognises(OtherRMSNorm)
def find_rms_norm(module: nn.Module) -> OtherRMSNorm | None:
    """Return the kind of a module that is called a norm and computes `weight · x / rms(x)`; None for any other."""
    parameters = dict(module.named_parameters())
    if list(parameters) != ["weight"] or parameters["weight"].dim() != 1:
        return None
    if not any(name in type(module).__name__ for name in CLASS_NAMES):
        return None
    if parameters["weight"].numel() < 2:  # which would fit inputs of any width
        return None
    if not takes_one_input(module):  # a gate may be another
        return None
    for name in EPSILON_NAMES:
        epsilon = getattr(module, name, None)
        with untouched_generators():
            if isinstance(epsilon, float) and _computes(module, epsilon):
                return OtherRMSNorm(epsilon)
    return None


@without_gradients
def _computes(module: nn.Module, epsilon: float) -> bool:
    """Say whether a copy of a module with random weights computes `weight · x / sqrt(mean(x²) + epsilon)`."""
    generator = torch.Generator().manual_seed(0)
    width = cast("Tensor", module.weight).numel()
    try:
        trial = plain_copy(module).cpu().float().eval()
        weight = torch.randn(width, generator=generator)
        cast("nn.Parameter", trial.weight).copy_(weight)
        for scale in SCALES:
            inputs = scale * torch.randn(2, 3, width, generator=generator)
            expected = weight * functional.rms_norm(inputs, (width,), eps=epsilon)
            found = trial.forward(inputs)  # and none of the hooks, which a copy keeps
            if not isinstance(found, Tensor) or found.shape != expected.shape:
                return False
            if not torch.allclose(found.float(), expected, rtol=TOLERANCE, atol=TOLERANCE):
                return False
    except Exception:  # a module that fails in the trial is not recognised
        return False
    return True
