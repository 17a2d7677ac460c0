"""Gradients by group are those of each group's rows alone."""

import pytest
import torch

from dualform.identity.grouped_products import (
    RowGroups,
    add_by_group,
    gradients_by_group,
    sum_by_group,
    sum_unsorted_by_group,
)
from dualform.identity.parameter_maps import PARAMETER_MAPS

SHAPES = {
    "outer": (4, 3),
    "transposed": (3, 4),
    "grouped": (4, 3),
    "transposed_kernel": (3, 4, 1),
    "rows": (5, 4),
    "scale": (4,),
    "bias": (4,),
}


@pytest.mark.parametrize("codes", [[0, 0, 0, 0, 0, 0], [2, 0, 2, 7, 0, 2], [1, 1, 3, 3, 3, 4]])
@pytest.mark.parametrize("name", PARAMETER_MAPS)
def test_each_groups_gradient_is_that_of_its_rows(name: str, codes: list[int]) -> None:
    torch.manual_seed(0)
    parameter_map, shape = PARAMETER_MAPS[name], SHAPES[name]
    values = torch.randn(6, 4, dtype=torch.float64)
    keys = torch.randn(6, 4 if name == "scale" else 3, dtype=torch.float64)
    if parameter_map.takes_ids:
        keys = torch.randint(5, (6, 1))
    of = torch.tensor(codes)
    groups = RowGroups.of_codes(of)
    assert groups.present == tuple(sorted(set(codes)))
    found = gradients_by_group(parameter_map, groups.sort(values), groups.sort(keys), groups, shape, torch.float64)
    for group, gradient in zip(groups.present, found, strict=True):
        mine = of == group
        expected = parameter_map.gradient(values[mine], keys[mine], shape).reshape(shape)
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)


CODES = {
    "one group": [0, 0, 0, 0, 0, 0],
    "mixed": [2, 0, 2, 7, 0, 2],
    "in order": [1, 1, 3, 3, 3, 4],
    "runs": [1] * 16 + [0] * 32 + [3] * 16,
    "runs, one after the other": [0] * 16 + [1] * 16,
}


@pytest.mark.parametrize("codes", CODES.values(), ids=CODES)
def test_rows_need_no_order_to_be_summed_by_group(codes: list[int]) -> None:
    groups = RowGroups.of_codes(torch.tensor(codes))
    rows = torch.randn(len(codes), 3, dtype=torch.float64)
    expected = sum_by_group(groups.sort(rows), groups, torch.float64)
    torch.testing.assert_close(sum_unsorted_by_group(rows, groups, torch.float64), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("codes", CODES.values(), ids=CODES)
@pytest.mark.parametrize("name", PARAMETER_MAPS)
def test_gradients_are_added_to_totals_by_group(name: str, codes: list[int]) -> None:
    torch.manual_seed(0)
    parameter_map, shape, count = PARAMETER_MAPS[name], SHAPES[name], len(codes)
    values = torch.randn(count, 4, dtype=torch.float64)
    keys = torch.randn(count, 4 if name == "scale" else 3, dtype=torch.float64)
    if parameter_map.takes_ids:
        keys = torch.randint(5, (count, 1))
    of = torch.tensor(codes)
    for groups in (max(codes) + 1, max(codes) + 2):  # with a group that has no row here
        total = torch.randn(groups, *shape, dtype=torch.float64)
        parts = [values[of == group] for group in range(groups)], [keys[of == group] for group in range(groups)]
        gradients = [parameter_map.gradient(*part, shape).reshape(shape) for part in zip(*parts, strict=True)]
        expected = 0.9 * total - 0.2 * torch.stack(gradients)
        add_by_group(total, parameter_map, values, keys, RowGroups.of_codes(of), keep=0.9, take=-0.2)
        torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("codes", CODES.values(), ids=CODES)
def test_a_run_is_the_longest_that_divides_all_groups_rows(codes: list[int]) -> None:
    run = RowGroups.of_codes(torch.tensor(codes)).run
    lengths = [length for length in range(1, len(codes) + 1) if len(codes) % length == 0]
    whole = [n for n in lengths if all(len(set(codes[i : i + n])) == 1 for i in range(0, len(codes), n))]
    assert run == max(whole)


def test_padded_groups_have_their_rows_and_zeros() -> None:
    groups = RowGroups.of_codes(torch.tensor([4, 1, 4, 4, 1]))
    rows = torch.arange(1.0, 6.0)[:, None]
    assert groups.sort_padded(rows, zeros=True)[..., 0].tolist() == [[2.0, 5.0, 0.0], [1.0, 3.0, 4.0]]


def test_no_rows_have_no_groups() -> None:
    groups = RowGroups.of_codes(torch.zeros(0, dtype=torch.int64))
    assert groups.present == ()
    assert groups.slices == ()


def test_low_precision_rows_are_summed_in_float32() -> None:
    rows = torch.full((4096, 1), 1.0, dtype=torch.bfloat16)
    groups = RowGroups.of_codes(torch.arange(4096) // 2048)
    torch.testing.assert_close(sum_by_group(rows, groups, torch.float32), torch.tensor([[2048.0], [2048.0]]))
