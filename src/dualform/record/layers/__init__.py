"""The layer kinds that can be recorded, one kind a file.

A new kind is a subclass of `LayerKind`, registered by `@records(ModuleType)` in a file of its own, imported here.
"""

from dualform.record.layers.conv import Conv1d, Conv2d, Conv3d
from dualform.record.layers.kind import LayerKind, Role, find_kind, kinds, records
from dualform.record.layers.linear import Linear

__all__ = ["Conv1d", "Conv2d", "Conv3d", "LayerKind", "Linear", "Role", "find_kind", "kinds", "records"]
