"""The layer kinds that can be recorded, one family a file.

A new kind is a subclass of `LayerKind`, registered by `@records(ModuleType)` in a file of its own, imported here.
"""

from dualform.record.layers import conv, embedding, linear, norms  # noqa: F401 (an import registers the kinds)
from dualform.record.layers.kind import LayerKind, Role, find_kind, kinds, records, registered

__all__ = ["LayerKind", "Role", "find_kind", "kinds", "records", "registered"]
