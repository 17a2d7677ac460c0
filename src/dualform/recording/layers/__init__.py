"""The layer kinds that can be recorded, one family a file.

A new kind is a subclass of `LayerKind`, registered by `@records(ModuleType)` in a file of its own, imported here. A
module that computes several layers in one call is a `Composite`, registered by `@composes(ModuleType)`.
"""

from dualform.recording.layers import (  # noqa: F401 (these register)
    attention,
    bilinear,
    conv,
    conv_transpose,
    elementwise,
    embedding,
    embedding_bag,
    linear,
    norms,
    recurrent,
    rms_norms,
)
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
from dualform.recording.layers.kind import (
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
