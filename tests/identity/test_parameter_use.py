"""Uses of parameters as data: what they refuse, and what they say of a layer."""

from typing import Any

import pytest

from dualform.errors import FormatError
from dualform.identity.parameter_maps import PARAMETER_MAPS
from dualform.identity.parameter_use import ParameterUse, matrix_and_bias, takes_ids

WEIGHT = ParameterUse("weight", "fc.weight", "outer")
BIAS = ParameterUse("bias", "fc.bias", "bias")
OTHER_BIAS = ParameterUse("bias_hh", "fc.other", "bias")
PART = ParameterUse("weight", "fc.weight", "outer", keys=(0, 3))
TABLE = ParameterUse("weight", "table.weight", "rows")


def test_a_whole_use_has_the_map_itself() -> None:
    assert WEIGHT.parameter_map is PARAMETER_MAPS["outer"]
    assert PART.parameter_map is not PARAMETER_MAPS["outer"]
    assert PART.parameter_map is ParameterUse("other", "another", "outer", keys=(0, 3)).parameter_map


def test_an_unknown_map_is_refused() -> None:
    with pytest.raises(FormatError, match=r"'fc.weight' is used by the map 'inner'; known are outer, .*newer dualform"):
        ParameterUse("weight", "fc.weight", "inner")


@pytest.mark.parametrize(
    "slices",
    [
        {"keys": (3, 3)},
        {"keys": (-1, 3)},
        {"rows": (4, 2)},
        {"values": ((0, 2), (4, 3)), "value_width": 6},
        {"values": ((0, 2), (4, 7)), "value_width": 6},
        {"values": ((0, 2),)},
    ],
)
def test_impossible_ranges_are_refused(slices: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match="ranges that cannot be"):
        ParameterUse("weight", "fc.weight", "outer", **slices)


@pytest.mark.parametrize(("name", "groups"), [("outer", 2), ("transposed_kernel", 1), ("transposed_kernel", -3)])
def test_impossible_groups_are_refused(name: str, groups: int) -> None:
    with pytest.raises(FormatError, match=f"in {groups} groups by the map '{name}'; expected at least 2"):
        ParameterUse("weight", "fc.weight", name, groups=groups)


def test_a_layer_takes_ids_where_a_parameter_is_a_table() -> None:
    assert takes_ids([TABLE])
    assert not takes_ids([WEIGHT, BIAS])


def test_matrix_and_bias() -> None:
    assert matrix_and_bias([WEIGHT, BIAS]) == (WEIGHT, BIAS)
    assert matrix_and_bias([BIAS]) == (None, BIAS)
    assert matrix_and_bias([]) == (None, None)
    for others in ([PART, BIAS], [TABLE], [WEIGHT, BIAS, OTHER_BIAS], [WEIGHT, WEIGHT]):
        assert matrix_and_bias(others) is None
