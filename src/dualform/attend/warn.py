"""Warn the user where the user's own code called us, however deep in the package the reason was found."""

import sys
import warnings
from pathlib import Path

_PACKAGE = str(Path(__file__).parents[1])


class MaskWarning(UserWarning):
    """A mask cannot be decided for some patterns, because they have no value in its columns."""


class OtherModelWarning(UserWarning):
    """A question was asked with a model that is not the recorded one."""


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn with the first line outside this package as the place."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
        level += 1
    warnings.warn(message, category, stacklevel=level)
