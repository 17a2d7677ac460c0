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
