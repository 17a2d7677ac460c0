"""Roles, the texts by which format version 1 listed a layer's parameters, as uses."""

from typing import Any

import pytest

from dualform.errors import FormatError
from dualform.store.version1 import upgraded_layer


def uses_of(**roles: str) -> list[dict[str, Any]]:
    """Return the uses of a layer that listed its parameters a, b, ... by these roles."""
    entry = {"kind": "K", "d_in": 7, "parameters": {role: parameter for parameter, role in roles.items()}}
    found = upgraded_layer(entry)
    assert found.keys() == {"kind", "d_in", "uses"}
    return list(found["uses"])


@pytest.mark.parametrize(
    ("role", "expected"),
    [
        ("weight", {"map": "outer"}),
        ("transposed", {"map": "transposed"}),
        ("grouped", {"map": "grouped"}),
        ("rows", {"map": "rows"}),
        ("scale", {"map": "scale"}),
        ("weight(keys=0:64)", {"map": "outer", "keys": [0, 64]}),
        ("weight(rows=8:16)", {"map": "outer", "rows": [8, 16]}),
        (
            "weight(keys=4:7;values=0:8+12:16/16)",
            {"map": "outer", "keys": [4, 7], "values": [[0, 8], [12, 16]], "value_width": 16},
        ),
    ],
)
def test_a_role_becomes_a_use(role: str, expected: dict[str, Any]) -> None:
    assert uses_of(a=role) == [{"name": "weight", "parameter": "a", **expected}]


def test_a_slice_of_all_of_a_value_is_none() -> None:
    """Version 1 gave it to the second bias of a recurrent layer, which could not have the role of the first."""
    assert uses_of(a="bias", b="bias(values=0:12/12)") == [
        {"name": "bias_ih", "parameter": "a", "map": "bias"},
        {"name": "bias_hh", "parameter": "b", "map": "bias"},
    ]


def test_every_use_has_a_name_of_its_own() -> None:
    names = [use["name"] for use in uses_of(a="weight", b="bias")]
    assert names == ["weight", "bias"]
    names = [use["name"] for use in uses_of(a="weight(keys=0:4)", b="weight(keys=4:7)", c="bias")]
    assert names == ["weight_ih", "weight_hh", "bias"]
    names = [use["name"] for use in uses_of(a="weight(keys=0:4)", b="weight(keys=4:7)", c="weight(keys=5:7)")]
    assert names == ["weight_0", "weight_1", "weight_2"]


@pytest.mark.parametrize("role", ["", "wait", "weight(", "weight()x", "weight(columns=0:3)", "bias[0:3]"])
def test_other_roles_are_refused(role: str) -> None:
    with pytest.raises(FormatError, match="is no role of a parameter"):
        uses_of(a=role)
