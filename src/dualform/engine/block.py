"""Some patterns of one layer, as a job sees them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualform.identity.parameter_use import ParameterUse


@dataclass(frozen=True, slots=True)
class Block:
    """Some patterns of one layer, decoded.

    Attributes:
        patterns: (n,) their numbers in the layer, counted from the start of the run.
        keys: (n, d_in)
        values: (n, d_out), where asked for.
        coefficients: use -> (n,), for each of the layer's parameters whose optimizer has coefficients, where asked for.
        scales: (n,) a factor that each key has still to be multiplied with; None where keys are whole.
    """

    patterns: npt.NDArray[np.int64]
    keys: Tensor
    values: Tensor | None = None
    coefficients: Mapping[ParameterUse, Tensor] = field(default_factory=dict)
    scales: Tensor | None = None

    @property
    def pattern_ids(self) -> Tensor:
        """The patterns' numbers as a tensor on the device of the keys."""
        device = self.keys.device
        if device.type != "cpu" and len(self.patterns) == self.patterns[-1] - self.patterns[0] + 1:
            return torch.arange(int(self.patterns[0]), int(self.patterns[-1]) + 1, device=device)
        return torch.from_numpy(self.patterns).to(device)
