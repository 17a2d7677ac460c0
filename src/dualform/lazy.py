"""Modules that are loaded when they are first used, because loading them takes long."""

import importlib
from typing import Any


class Lazy:
    """Stands for a module."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


compute: Any = Lazy("pyarrow.compute")
parquet: Any = Lazy("pyarrow.parquet")
