"""Labels of groups as a manifest holds them: the type of a value and the value as text, and back.

JSON alone would not do: it has no NaN, and no whole numbers that every reader keeps whole.
"""

import math
from typing import Any, Literal

_Type = Literal["none", "bool", "int64", "double", "string"]


def label_text(value: Any) -> tuple[_Type, str]:
    """Return the type of a value and the value as text.

    >>> label_text(5), label_text(float("nan")), label_text(None)
    (('int64', '5'), ('double', 'nan'), ('none', ''))
    """
    if value is None:
        return "none", ""
    if isinstance(value, bool):
        return "bool", str(value)
    if isinstance(value, int):
        return "int64", str(value)
    return ("double", repr(value)) if isinstance(value, float) else ("string", value)


def label_value(kind: str, text: str) -> Any:
    """Return the value of a type that was written as text.

    >>> label_value("int64", "5"), label_value("bool", "True"), label_value("none", "")
    (5, True, None)
    """
    if kind == "none":
        return None
    if kind == "bool":
        return text == "True"
    if kind == "int64":
        return int(text)
    return (math.nan if text == "nan" else float(text)) if kind == "double" else text


def label_problem(kind: str, text: str) -> bool:
    """Say whether a text is not how a value of a type is written."""
    try:
        return label_text(label_value(kind, text)) != (kind, text)
    except ValueError:
        return True
