"""The layer kinds that can be recorded, one family a file.

A new kind is a subclass of `LayerKind`, registered by `@records(ModuleType)` in a file of its own: every file here
is imported. A module that computes several layers in one call is a `Composite`, registered by `@composes(ModuleType)`.
"""

import importlib
import pkgutil

from dualform.recording.layers.composite import (
    Composite,
    Report,
    base_type,
    composes,
    composites,
    computed_parameters,
    find_composite,
    sums_in_own_order,
)
from dualform.recording.layers.layer_kind import (
    LayerKind,
    find_kind,
    kind_by_type,
    kinds,
    present,
    records,
    register_layer,
    registered,
)

__all__ = [
    "Composite",
    "LayerKind",
    "Report",
    "base_type",
    "composes",
    "composites",
    "computed_parameters",
    "find_composite",
    "find_kind",
    "kind_by_type",
    "kinds",
    "present",
    "records",
    "register_layer",
    "registered",
    "sums_in_own_order",
]

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")  # registers its kinds
