"""What a permuted batch shows of rows: the comparison in parts against the same on whole tensors."""

import pytest
import torch
from torch import Tensor

from dualform.recording import row_evidence
from dualform.recording.row_evidence import FEW_ROWS, FLAT, ROUNDING, SAME, _state, row_order


def whole_state(before: Tensor, after: Tensor, order: Tensor) -> str:
    """Return what `_state` says, from all rows at once."""
    before, after = before.flatten(1), after.flatten(1)
    rounding = 0.0
    if before.is_floating_point():
        rounding = ROUNDING * torch.finfo(before.dtype).eps * float(before.abs().max()) * before.shape[1] ** 0.5
    before, after = before.double(), after.double()
    distance, error = (before[order] - before).norm(dim=1), (after - before[order]).norm(dim=1)
    if not bool(torch.isfinite(error).all()):
        return "other"
    if float(distance.max()) <= FLAT * rounding:
        return "equal" if float(error.max()) <= FLAT * rounding else "other"
    return "moved" if bool((error <= torch.clamp(SAME * distance, min=rounding)).all()) else "other"


def cases(rows: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return batches before and after a permutation, by what happened to them."""
    torch.manual_seed(rows)
    order, plain = row_order(rows), torch.randn(rows, 3, 7)
    late = plain[order].clone()
    late[-1, 2, 6] += 9.0  # the last element alone is not where it should be
    same = torch.ones(rows, 3, 7)
    almost = same.clone()
    almost[-1] += 1e-6
    jump = same.clone()
    jump[-1] += 1.0
    infinite = plain.clone()
    infinite[-1, 0, 0] = torch.inf
    ids = torch.randint(50, (rows, 21))
    return {
        "moved": (plain, plain[order]),
        "moved, rounded": (plain, plain[order] * (1 + 1e-6)),
        "stayed": (plain, plain),
        "the last one moved wrongly": (plain, late),
        "equal": (same, same.clone()),
        "equal but for rounding": (same, almost),
        "equal, then not": (same, jump),
        "one differs": (jump, jump[order]),
        "infinite": (infinite, infinite[order]),
        "numbers": (ids, ids[order]),
        "numbers that stayed": (ids, ids),
        "columns elsewhere": (plain.movedim(2, 1), plain[order].movedim(2, 1)),
    }


@pytest.mark.parametrize("rows", [2, 3, 4, 17])
@pytest.mark.parametrize("elements", [1, 64, 1 << 15])
def test_rows_that_are_looked_at_in_parts_tell_the_same_as_all_at_once(
    rows: int, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_evidence, "MAX_CHUNK_ELEMENTS", elements)
    order = row_order(rows)
    found = {what: _state(*both, order) for what, both in cases(rows).items()}
    assert found == {what: whole_state(*both, order) for what, both in cases(rows).items()}
    assert set(found.values()) == {"moved", "equal", "other"}


@pytest.mark.parametrize("rows", [2, 3, 4, 5, 8, 31, 128])
def test_no_row_stays_and_no_power_of_the_order_rolls_or_flips(rows: int) -> None:
    order = row_order(rows).tolist()
    assert sorted(order) == list(range(rows))
    assert all(place != i for i, place in enumerate(order))
    plain = [[(i + shift) % rows for i in range(rows)] for shift in range(rows)] + [list(range(rows))[::-1]]
    power = order
    for _ in range(min(rows, 12) - 2 if rows > FEW_ROWS else 0):
        assert power not in plain
        power = [order[i] for i in power]


@pytest.mark.parametrize("least", [1, 1 << 12])
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e18, 1e30])
def test_rows_of_any_magnitude_are_compared_by_themselves_or_together(
    least: int, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 the squares of some of these magnitudes are zero or infinite."""
    monkeypatch.setattr(row_evidence, "MIN_ROW_ELEMENTS", least)
    monkeypatch.setattr(row_evidence, "MAX_CHUNK_ELEMENTS", 64)
    order = row_order(17)
    every = cases(17)
    plain = every["moved"][0]
    stayed = plain[order].clone()
    stayed[-6:] = plain[-6:]  # two whole parts of three rows, 63 elements
    every["the last rows stayed"] = plain, stayed
    scaled = {
        what: (before * scale, after * scale) if before.is_floating_point() else (before, after)
        for what, (before, after) in every.items()
    }
    found = {what: _state(*both, order) for what, both in scaled.items()}
    assert found == {what: whole_state(*both, order) for what, both in scaled.items()}
    assert found["moved"] == "moved"
    assert found["the last one moved wrongly"] == found["the last rows stayed"] == "other"
