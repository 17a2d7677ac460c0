"""Format version 1: a layer's parameters were listed by role, a text that is parsed here and nowhere else.

    "parameters": {"weight(keys=0:64)": "lstm.weight_ih_l0", "bias": "lstm.bias_ih_l0", ...}

A role named a parameter map and, in brackets, the slices that it joins: `weight(keys=0:64)` takes the first 64 elements
of a key; `weight(values=0:8+12:16/16)` takes those elements of a value that is 16 wide; `weight(rows=0:64)` uses the
first 64 rows of the parameter. Several were separated by semicolons. Two biases could not have the same role, so the
second one of a recurrent layer was listed with a slice that takes all of a value; that slice is dropped here.
"""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from dualform.errors import FormatError

VERSION = 1
MAPS = {
    "weight": "outer",
    "transposed": "transposed",
    "grouped": "grouped",
    "rows": "rows",
    "scale": "scale",
    "bias": "bias",
}
"""The name that version 2 has for the parameter map of a role of version 1."""


def upgraded(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest of version 1 as version 2 has it; one that cannot be read so is a `FormatError`."""
    try:
        layers = {name: upgraded_layer(entry) for name, entry in document["layers"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"'layers' cannot be read: {type(error).__name__}: {error}") from error
    return {**document, "layers": layers}


def upgraded_layer(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a layer of a version 1 manifest as version 2 describes it, with `uses` instead of `parameters`."""
    rest = {name: found for name, found in entry.items() if name != "parameters"}
    roles = [(_parsed_role(role), parameter) for role, parameter in entry["parameters"].items()]
    names = _use_names([use["map"] for use, _ in roles])
    return rest | {
        "uses": [
            {"name": name, "parameter": parameter, **use} for name, (use, parameter) in zip(names, roles, strict=True)
        ]
    }


def _use_names(maps: list[str]) -> list[str]:
    """Return a name for each use of a layer: weight and bias. Where there are two, they are a recurrent layer's.

    A recurrent layer listed the input's parameter (`_ih`) before the hidden state's (`_hh`).
    """
    stems = ["bias" if each == "bias" else "weight" for each in maps]
    counts, seen, names = Counter(stems), Counter[str](), []
    for stem in stems:
        ends = {1: [""], 2: ["_ih", "_hh"]}.get(counts[stem], [f"_{i}" for i in range(counts[stem])])
        names.append(stem + ends[seen[stem]])
        seen[stem] += 1
    return names


def _parsed_role(role: str) -> dict[str, Any]:
    """Return the map and the slices of a role."""
    match = re.fullmatch(r"(\w+)(?:\((.*)\))?", role)
    if match is None or match[1] not in MAPS:
        raise FormatError(f"{role!r} is no role of a parameter; known are {', '.join(MAPS)}. Use a newer dualform.")
    use: dict[str, Any] = {"map": MAPS[match[1]]}
    for part in match[2].split(";") if match[2] else ():
        what, _, where = part.partition("=")
        if what == "values":
            spans, _, width = where.partition("/")
            values = [_span(span) for span in spans.split("+")]
            if values != [[0, int(width)]]:
                use |= {"values": values, "value_width": int(width)}
        elif what in ("keys", "rows"):
            use[what] = _span(where)
        else:
            raise FormatError(f"{role!r} is no role of a parameter: {what!r} is none of keys, values, rows.")
    return use


def _span(text: str) -> list[int]:
    start, stop = text.split(":")
    return [int(start), int(stop)]
