"""Logged step facts in, coefficients or linear maps out: pure mathematics, one optimizer family a file.

An optimizer either has coefficients, one number per step (`scalar.py`, registered with `@derives`), or it is replayed
and its steps are read as linear maps (`elementwise.py`, `onesided.py`, registered with `replays`; see `replayed.py` for
what a new family has to give). Both belong to a horizon (a number of steps), because momentum and decay go on changing
a pattern's share after its step.
"""

import dualform.identity.families.elementwise
import dualform.identity.families.onesided  # noqa: F401 (both register their optimizers)
from dualform.identity.families.family import Coefficients, Facts, derive, derives, optimizers
from dualform.identity.families.replayed import kinds
from dualform.identity.families.scalar import derive_scalar

__all__ = ["Coefficients", "Facts", "derive", "derive_scalar", "derives", "kinds", "optimizers"]
