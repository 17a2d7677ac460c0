"""Warnings that point at the user's own line, however many frames of dualform and torch lie between."""

import contextlib
import os
import sys
import warnings
from pathlib import Path

import torch

_INSIDE = (
    f"{Path(torch.__file__).parent}{os.sep}",
    f"{Path(__file__).parent.parent}{os.sep}",
    contextlib.__file__,
)


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line that belongs to neither dualform nor torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


class WarnOnce:
    """Warns the user of each thing once in a recording."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def __call__(self, text: str, *, key: str | None = None) -> None:
        """Warn, unless this text was said before, or another one of the same key."""
        if self.is_new(text if key is None else key):
            warn_user(text)

    def is_new(self, key: str) -> bool:
        """Say whether nothing was said of this key before, and remember it."""
        new = key not in self._told
        self._told.add(key)
        return new
