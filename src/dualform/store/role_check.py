"""Does a parameter's shape fit its role in a layer? Arithmetic on widths alone; no tensor is made.

`dualform.forms` says what a role means. A role from a manifest is looked at here first, because a part such as
`values=0:999999999999/4` would take memory only to be read.
"""

import math
import re
from collections.abc import Sequence

from dualform.forms import FORMS
from dualform.store.documents import cut

_RANGE = r"\d{1,12}:\d{1,12}"
_PART = rf"keys={_RANGE}|rows={_RANGE}|values={_RANGE}(?:\+{_RANGE})*/\d{{1,12}}"
_ROLE = re.compile(rf"([a-z]+)(?:\(((?:{_PART})(?:;(?:{_PART}))*)\))?", re.ASCII)


def role_problem(role: str, d_in: int, d_out: int, shape: Sequence[int]) -> str:
    """Say why a parameter of this shape cannot have a role in a layer of these widths; empty where it can.

    >>> role_problem("weight(keys=0:3)", 5, 4, (4, 3))
    ''
    >>> role_problem("weight(keys=0:3)", 2, 4, (4, 3))
    "'weight(keys=0:3)' does not lie within a key of width 2"
    """
    match = _ROLE.fullmatch(role)
    if match is None or match[1] not in FORMS:
        return f"{cut(repr(role))} is no role of a parameter; known are {', '.join(FORMS)}. Use a newer dualform"
    items = [item.split("=") for item in match[2].split(";")] if match[2] else []
    parts = dict(items)
    if len(parts) < len(items):
        return f"{cut(repr(role))} names a part twice"
    keys = _ranges(parts.get("keys", f"0:{d_in}"), d_in)
    if keys is None:
        return f"{cut(repr(role))} does not lie within a key of width {d_in}"
    spans, _, width = parts.get("values", f"0:{d_out}/{d_out}").partition("/")
    values = _ranges(spans, d_out)
    if values is None or int(width) != d_out:
        return f"{cut(repr(role))} does not lie within a value of width {d_out}"
    if "rows" in parts:
        rows = _ranges(parts["rows"], shape[0] if shape else 0)
        if rows is None or not shape:
            return f"{cut(repr(role))} does not lie within the rows of shape {tuple(shape)}"
        shape = (rows, *shape[1:])
    if not _fits(match[1], keys, values, tuple(shape)):
        return (
            f"shape {tuple(shape)} does not fit {cut(repr(role))} with keys of width {d_in} and values of width {d_out}"
        )
    return ""


def _ranges(text: str, width: int) -> int | None:
    """Return how many elements ranges START:STOP+START:STOP cover; None where one does not lie within a width."""
    total = 0
    for part in text.split("+"):
        start, stop = map(int, part.split(":"))
        if not start <= stop <= width:
            return None
        total += stop - start
    return total


def _fits(name: str, d_in: int, d_out: int, shape: tuple[int, ...]) -> bool:
    """Say whether a parameter's shape is the one that a form gives for these widths."""
    elements = math.prod(shape)
    if name == "weight":
        return len(shape) >= 2 and shape[0] == d_out and math.prod(shape[1:]) == d_in
    if name == "transposed":
        return shape == (d_in, d_out)
    if name == "grouped":
        width = math.prod(shape[1:])
        groups, rest = divmod(d_in, width) if width else (0, 1)
        return len(shape) >= 2 and shape[0] == d_out and not rest and groups > 0 and d_out % groups == 0
    if name == "rows":
        return len(shape) == 2 and d_in == 1 and shape[1] == d_out
    return elements == d_out and (name == "bias" or d_in == d_out)
