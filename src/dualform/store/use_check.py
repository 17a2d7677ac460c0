"""Does a parameter's shape fit its use in a layer? Arithmetic on widths alone; no tensor is made.

`dualform.identity` says what a use means. A use from a manifest is looked at here first, because a slice such as the
first 999999999999 elements of a value would take memory only to be read.
"""

import math
from collections.abc import Iterable, Sequence

from dualform.identity.parameter_use import ParameterUse, Span
from dualform.printable import cut


def use_problem(use: ParameterUse, d_in: int, d_out: int, shape: Sequence[int]) -> str:
    """Say why a layer of these widths cannot use a parameter of this shape so; empty where it can.

    >>> use_problem(ParameterUse("weight", "fc.weight", "outer", keys=(0, 3)), 5, 4, (4, 3))
    ''
    >>> use_problem(ParameterUse("weight", "fc.weight", "outer", keys=(0, 3)), 2, 4, (4, 3))
    "use 'weight' does not lie within a key of width 2"
    """
    keys = d_in if use.keys is None else _covered([use.keys], d_in)
    if keys is None:
        return f"use {cut(repr(use.name))} does not lie within a key of width {d_in}"
    values = _covered(use.values, d_out) if use.values else d_out
    if values is None or (use.values and use.value_width != d_out):
        return f"use {cut(repr(use.name))} does not lie within a value of width {d_out}"
    if use.rows is not None:
        rows = _covered([use.rows], shape[0] if shape else 0)
        if rows is None or not shape:
            return f"use {cut(repr(use.name))} does not lie within the rows of shape {tuple(shape)}"
        shape = (rows, *shape[1:])
    if not _fits(use.map, keys, values, tuple(shape), groups=use.groups or 1):
        return (
            f"shape {tuple(shape)} does not fit use {cut(repr(use.name))}, map {use.map!r}, with keys of width {d_in} "
            f"and values of width {d_out}"
        )
    return ""


def _covered(spans: Iterable[Span], width: int) -> int | None:
    """Return how many elements spans cover; None where one does not lie within a width."""
    total = 0
    for start, stop in spans:
        if not 0 <= start <= stop <= width:
            return None
        total += stop - start
    return total


def _fits(name: str, d_in: int, d_out: int, shape: tuple[int, ...], *, groups: int) -> bool:
    """Say whether a parameter's shape is the one that a parameter map gives for these widths."""
    elements = math.prod(shape)
    if name == "outer":
        return len(shape) >= 2 and shape[0] == d_out and math.prod(shape[1:]) == d_in
    if name == "transposed":
        return shape == (d_in, d_out)
    if name == "grouped":
        width = math.prod(shape[1:])
        groups, rest = divmod(d_in, width) if width else (0, 1)
        return len(shape) >= 2 and shape[0] == d_out and not rest and groups > 0 and d_out % groups == 0
    if name == "transposed_kernel":
        if len(shape) < 3 or shape[0] % groups:
            return False
        return shape[0] * math.prod(shape[2:]) == d_in and groups * shape[1] == d_out
    if name == "rows":
        return len(shape) >= 2 and d_in == 1 and shape[-1] == d_out
    return elements == d_out and (name == "bias" or d_in == d_out)
