"""What every optimizer family takes and gives, and the registry of families.

Does not derive anything itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from dualform.errors import FormatError

Of = Literal["parameter", "buffer"]


@dataclass(frozen=True, slots=True)
class Facts:
    """What the recorder logged of one parameter, one entry per step in which it was updated.

    Attributes:
        optimizer: the optimizer's type name, which decides the family.
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


Derivation = Callable[[Facts, int, Of], Coefficients]
_DERIVATIONS: dict[str, Derivation] = {}


def derives(*optimizers: str) -> Callable[[Derivation], Derivation]:
    """Register a function as the derivation for these optimizers."""

    def register(derivation: Derivation) -> Derivation:
        for optimizer in optimizers:
            _DERIVATIONS[optimizer] = derivation
        return derivation

    return register


def optimizers() -> tuple[str, ...]:
    """Return the names of the optimizers whose coefficients can be derived."""
    return tuple(sorted(_DERIVATIONS))


def derive(facts: Facts, *, horizon: int, of: Of = "parameter") -> Coefficients:
    """Derive the coefficients of a parameter (or of its momentum buffer) after `horizon` steps."""
    derivation = _DERIVATIONS.get(facts.optimizer)
    if derivation is None:
        raise FormatError(
            f"The run was trained by {facts.optimizer!r}; coefficients are known for {', '.join(optimizers())}. "
            "Open it with a newer dualform."
        )
    return derivation(facts, horizon, of)
