"""The least and the greatest element: those that torch finds, whoever looks for them."""

import math

import pytest
import torch

from dualform.store import element_range as module
from dualform.store.element_range import RangeOfParts, element_range, joined_ranges

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.bool]


@pytest.mark.parametrize("small_bytes", [-1, 1 << 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_range_is_that_of_torch(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, small_bytes: int) -> None:
    monkeypatch.setattr(module, "SMALL_BYTES", small_bytes)
    rows = (30 * torch.randn(50, 7, generator=torch.Generator().manual_seed(0))).to(dtype)
    for some in (rows, rows[:, 2:5], rows[3:4, :1]):
        low, high = torch.aminmax(some)
        assert element_range(some) == (float(low), float(high))
    assert element_range(rows[:0]) is None
    assert element_range(rows[:, :0]) is None


@pytest.mark.parametrize("small_bytes", [-1, 1 << 16])
def test_what_is_no_number_is_told(monkeypatch: pytest.MonkeyPatch, small_bytes: int) -> None:
    monkeypatch.setattr(module, "SMALL_BYTES", small_bytes)
    rows = torch.tensor([1.0, math.nan, 2.0])
    assert all(map(math.isnan, element_range(rows) or ()))
    assert element_range(torch.tensor([1.0, -math.inf])) == (-math.inf, 1.0)


def test_ranges_of_parts_are_joined() -> None:
    assert joined_ranges(None, None) is None
    assert joined_ranges((1.0, 2.0), None) == joined_ranges(None, (1.0, 2.0)) == (1.0, 2.0)
    assert joined_ranges((1.0, 5.0), (-1.0, 2.0)) == (-1.0, 5.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_the_range_of_parts_is_that_of_the_whole(dtype: torch.dtype) -> None:
    rows = (30 * torch.randn(50, 7, generator=torch.Generator().manual_seed(0))).to(dtype)
    for size in (1, 7, 50):
        parts = RangeOfParts()
        for part in (*rows.split(size), rows[:0]):
            parts.look(part)
        assert parts.ends() == element_range(rows)
    assert RangeOfParts().ends() is None


@pytest.mark.parametrize("place", [0, 3, 5])
def test_a_part_with_what_is_no_number_is_told_of_the_whole(place: int) -> None:
    rows = torch.arange(6.0)
    rows[place] = math.nan
    parts = RangeOfParts()
    for part in rows.split(2):
        parts.look(part)
    assert all(map(math.isnan, parts.ends() or ()))
