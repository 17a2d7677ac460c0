"""The factors of a gradient that is divided by rows, from samples that processes have put together."""

import numpy as np
import pytest
import torch

from dualform.recording.divided_gradients import (
    HALF_REDUCED,
    ReducedRows,
    RowHistory,
    RowSeries,
    RowSums,
    common_factors,
    follow_rows,
)
from dualform.recording.gradient_history import Accumulation
from dualform.recording.gradient_samples import GradientSample

SIZE = 2  # processes
COUNT = 12  # elements of a sample with all rows


def series_of(reductions: list[int], *, clip: float = 1.0, factor: float = 1 / SIZE, noise: float = 0.0) -> RowSeries:
    """Return what processes exchange of a gradient that is reduced after the last backward, and after some before."""
    generator = np.random.default_rng(3)
    micros = max(reductions) + 1
    samples, before, unchanged, gone = [], [], [], []
    reduced, own = np.zeros(COUNT), np.zeros(COUNT)
    for micro in range(micros):
        before.append(reduced.copy())
        gone.append(0.0 if own.any() else float(SIZE))
        own = own + generator.normal(size=COUNT)
        samples.append(own.copy())
        unchanged.append(0.0 if micro in reductions else float(SIZE))
        if micro in reductions:
            reduced, own = reduced + factor * own, np.zeros(COUNT)
    noisy = torch.from_numpy(clip * reduced + noise * generator.normal(size=COUNT))
    rows = ReducedRows(np.array(before), np.array(gone), GradientSample(noisy, norm=noisy.norm()))
    lengths = np.linalg.norm(samples, axis=1)
    return RowSeries(list(range(micros)), np.array(samples), lengths, np.array(unchanged), rows, 3)


@pytest.mark.parametrize("reductions", [[0], [0, 1], [0, 1, 2], [2], [1, 2], [0, 2]])
@pytest.mark.parametrize("clip", [1.0, 0.37])
@pytest.mark.parametrize("factor", [1 / SIZE, 0.2])
def test_each_backward_has_its_factor(reductions: list[int], clip: float, factor: float) -> None:
    series = series_of(reductions, clip=clip, factor=factor)
    common = common_factors([series], SIZE)
    found = follow_rows(series, SIZE, common, coarse=False)
    assert found.objection is None
    assert found.of == pytest.approx(dict.fromkeys(range(max(reductions) + 1), clip * factor), rel=1e-9)
    if clip == 1.0 and factor == 1 / SIZE:
        assert set(found.of.values()) == {1 / SIZE}  # to the bit
    other = follow_rows(series, SIZE, (1.0, 7.0), coarse=False)  # whatever is tried first
    assert other.objection is None
    assert other.of == pytest.approx(found.of, rel=1e-9)


def test_what_is_no_factor_is_an_objection() -> None:
    noisy = series_of([0, 1], noise=1e-3)
    assert "is not made of the gradients of all 2 processes" in str(
        follow_rows(noisy, SIZE, common_factors([noisy], SIZE), coarse=False).objection
    )
    assert follow_rows(noisy, SIZE, common_factors([noisy], SIZE), coarse=True).objection is None
    series = series_of([0, 1])
    series.rows.gone[1] = 1.0
    assert follow_rows(series, SIZE, (1.0, 0.5), coarse=False).objection == HALF_REDUCED


def test_rows_are_put_together() -> None:
    sums = RowSums({"weight": 4, "bias": 3}, 1)
    total = np.zeros(sums.size)
    finals = []
    for rank, rows in enumerate((slice(0, 3), slice(3, 4))):
        final = GradientSample(torch.arange(4.0)[rows] + 1)
        event = Accumulation(0, None, GradientSample(torch.zeros(4)))
        own = {"weight": RowHistory([event], final, rows), "bias": RowHistory([], None, slice(0, 3 * (1 - rank)))}
        total += sums.pack(own)
        finals.append(final)
    joined = sums.joined(total, "weight", finals[1])
    assert joined.final is not None
    assert joined.final.elements.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert joined.gone.tolist() == [2.0]
    assert sums.joined(total, "bias", None).final is None
