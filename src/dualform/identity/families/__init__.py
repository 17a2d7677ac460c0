"""Logged step facts in, coefficients or linear maps out: pure mathematics, one optimizer family a file.

`optimizer_kind.py` has what an optimizer gives and the registry. `scalar.py` (SGD), `adam_and_relatives.py` (the
elementwise family; its mathematics is in the `elementwise` files) and `onesided.py` (Muon) register theirs: each file
here is imported. Coefficients and maps belong to a horizon (a number of steps), because momentum and decay go on
changing a pattern's share after its step.
"""

import importlib
import pkgutil

from dualform.identity.families.optimizer_facts import Coefficients, Facts, UpdateRates
from dualform.identity.families.optimizer_kind import derive, find_optimizer_kind, optimizer_kinds

__all__ = ["Coefficients", "Facts", "UpdateRates", "derive", "find_optimizer_kind", "optimizer_kinds"]

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")  # registers its optimizers
