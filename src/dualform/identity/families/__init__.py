"""Logged step facts in, coefficients or linear maps out: pure mathematics, one optimizer family a file.

`kind.py` has what an optimizer gives and the registry; `scalar.py` (SGD), `elementwise.py` (Adam and its relatives) and
`onesided.py` (Muon) register theirs. Coefficients and maps belong to a horizon (a number of steps), because momentum
and decay go on changing a pattern's share after its step.
"""

import dualform.identity.families.elementwise
import dualform.identity.families.onesided
import dualform.identity.families.scalar  # noqa: F401 (these register their optimizers)
from dualform.identity.families.facts import Coefficients, Facts, UpdateRates
from dualform.identity.families.kind import derive, find_optimizer_kind, optimizer_kinds

__all__ = ["Coefficients", "Facts", "UpdateRates", "derive", "find_optimizer_kind", "optimizer_kinds"]
