"""The layer kinds that can be recorded, one kind a file.

A new kind is a subclass of `LayerKind`, registered by `@records(ModuleType)` in a file of its own, imported here.
"""

from dualform.record.layers.kind import LayerKind, Role, find_kind, kinds, records
from dualform.record.layers.linear import Linear

__all__ = ["LayerKind", "Linear", "Role", "find_kind", "kinds", "records"]
