"""What every optimizer family takes and gives: the logged facts of a parameter's steps, and coefficients.

Derives nothing itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

CoefficientsOf = Literal["parameter", "buffer"]
Series = npt.NDArray[np.float64]
"""One number per step."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the recorder logged of one parameter, one entry per step in which it was updated.

    Attributes:
        optimizer: the optimizer's name (`naming.optimizer_name`), which decides the family.
        dtype: the parameter's dtype, as numpy names it; settings are rounded to it before they are used.
        step: (U,) the steps in which the parameter was updated, ascending.
        settings: the optimizer's settings by name, (U,) each.
    """

    optimizer: str
    dtype: str
    step: npt.NDArray[np.int64]
    settings: Mapping[str, npt.NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class Coefficients:
    """A tensor after `len(step)` steps, as numbers that multiply what it is made of.

    `tensor = start · W_0 + buffer · B_0 + sum_s step[s] · g_s`, where g_s is the gradient as the step saw it.
    """

    step: npt.NDArray[np.float64]
    start: float
    buffer: float


@dataclass(frozen=True, slots=True)
class UpdateRates:
    """How fast a parameter learnt at each of its updates, and what weight decay took of it, (U,) each."""

    rate: Series
    decay: Series


@dataclass(frozen=True, slots=True)
class MeasuredRate:
    """How fast a parameter learnt in one step, measured along the step's gradient G.

    Attributes:
        along: −⟨what becomes of G in the end, G⟩.
        square: ⟨G, G⟩, so that the rate is along / square.
        decay: what decay takes of the parameter in this step.
    """

    along: float
    square: float
    decay: float
