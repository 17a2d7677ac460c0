"""Every parameter map, whole and sliced: its gradient, its output and its factors agree with each other."""

import math

import pytest
import torch
from torch import Tensor

from dualform.identity.parameter_maps import PARAMETER_MAPS
from dualform.identity.parameter_use import ParameterUse

T, Q = 5, 3
Case = tuple[ParameterUse, int | None, tuple[int, ...], int]


def use(name: str, **slices: object) -> ParameterUse:
    """Return a use of a parameter "p"."""
    return ParameterUse("use", "p", name, **slices)  # type: ignore[arg-type]


CASES: dict[str, Case] = {  # the use, the width of a key (None for row numbers), the parameter's shape, d_out
    "outer": (use("outer"), 4, (2, 4), 2),
    "transposed": (use("transposed"), 4, (4, 2), 2),
    "grouped": (use("grouped"), 6, (6, 2), 6),
    "transposed_kernel": (use("transposed_kernel"), 6, (3, 2, 2), 2),
    "rows": (use("rows"), None, (3, 2), 2),
    "scale": (use("scale"), 4, (4,), 4),
    "bias": (use("bias"), 4, (2,), 2),
    "outer, columns of the key": (use("outer", keys=(1, 3)), 4, (2, 2), 2),
    "outer, elements of the value": (use("outer", values=((0, 1), (3, 5)), value_width=6), 4, (3, 4), 6),
    "outer, rows of the parameter": (use("outer", rows=(2, 4)), 4, (7, 4), 2),
    "outer, all three": (
        use("outer", keys=(0, 3), values=((0, 2), (4, 5)), value_width=5, rows=(1, 4)),
        4,
        (6, 3),
        5,
    ),
    "transposed_kernel, groups": (use("transposed_kernel", groups=2), 8, (4, 3, 2), 6),
    "bias, elements of the value": (use("bias", values=((1, 3),), value_width=4), 4, (2,), 4),
    "bias, rows of the parameter": (use("bias", rows=(2, 4)), 4, (6,), 2),
}


def made(name: str) -> tuple[ParameterUse, Tensor, Tensor, Tensor, tuple[int, ...]]:
    """Return a case's use, keys (T, d_in), queries (Q, d_in), values (T, d_out), and the parameter's shape."""
    found, d_in, shape, d_out = CASES[name]
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(T, d_out, generator=generator, dtype=torch.float64)
    if d_in is None:
        keys, queries = (torch.randint(shape[0], (n, 1), generator=generator) for n in (T, Q))
    else:
        keys, queries = (torch.randn(n, d_in, generator=generator, dtype=torch.float64) for n in (T, Q))
    return found, keys, queries, values, shape


def test_every_map_is_here() -> None:
    assert {found.map for found, *_ in CASES.values()} == PARAMETER_MAPS.keys()


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_a_sum_over_patterns(name: str) -> None:
    found, keys, _, values, shape = made(name)
    one_by_one = sum(found.parameter_map.gradient(values[i : i + 1], keys[i : i + 1], shape) for i in range(T))
    torch.testing.assert_close(found.parameter_map.gradient(values, keys, shape), one_by_one)


@pytest.mark.parametrize("name", CASES)
def test_unit_factors_times_values_are_the_shares_outputs(name: str) -> None:
    found, keys, queries, values, shape = made(name)
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for unit in range(values.shape[1]):
        units = torch.full((Q,), unit)
        factors = found.parameter_map.unit_factors(queries, keys, units, matrix)
        for i in range(T):
            share = matrix * found.parameter_map.gradient(values[i : i + 1], keys[i : i + 1], shape)
            expected = found.parameter_map.apply(share, queries)[:, unit]
            torch.testing.assert_close(factors[:, i] * values[i, unit], expected)


@pytest.mark.parametrize("name", CASES)
def test_a_projection_is_the_gradient_times_columns(name: str) -> None:
    found, keys, _, values, shape = made(name)
    columns = None if len(shape) == 1 else torch.randn(math.prod(shape[1:]), 2, dtype=torch.float64)
    factors = found.parameter_map.projection_factors(keys, columns)
    gradient = found.parameter_map.gradient(values, keys, shape)
    if factors is not None:
        placed = found.parameter_map.place_projection(values.T @ factors, shape[0])
        torch.testing.assert_close(placed, gradient[:, None] if columns is None else gradient @ columns)
    assert (factors is None) == (found.map in ("transposed", "grouped", "transposed_kernel", "rows", "scale"))


@pytest.mark.parametrize("name", CASES)
def test_what_a_map_says_of_its_keys(name: str) -> None:
    found, keys, _, values, shape = made(name)
    parameter_map = found.parameter_map
    gradient = parameter_map.gradient(values, keys, shape)
    other = (keys + 1) % shape[0] if parameter_map.takes_ids else 2 * keys
    changed = not torch.equal(parameter_map.gradient(values, other, shape), gradient)
    assert changed == (not parameter_map.is_bias) == (parameter_map.multiplies_keys or parameter_map.takes_ids)
    assert parameter_map.takes_ids == (not keys.is_floating_point())


@pytest.mark.parametrize("name", CASES)
def test_what_a_map_says_of_being_affine(name: str) -> None:
    found, *_ = made(name)
    affine = found.map in ("outer", "transposed", "transposed_kernel", "bias") and not found.values and not found.groups
    assert found.parameter_map.is_affine == affine
    assert found.parameter_map.is_plain_matrix == (name == "outer")
    assert found.parameter_map.is_plain_bias == (name == "bias")
