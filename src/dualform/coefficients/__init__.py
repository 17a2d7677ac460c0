"""Logged step facts in, coefficients out: pure mathematics, one optimizer family a file.

A family registers the optimizers it derives with `@derives("SGD", ...)`. Coefficients belong to a horizon (a number of
steps), because momentum and decay go on changing a pattern's share after its step.
"""

from dualform.coefficients.family import Coefficients, Facts, derive, derives, optimizers
from dualform.coefficients.scalar import derive_scalar

__all__ = ["Coefficients", "Facts", "derive", "derive_scalar", "derives", "optimizers"]
