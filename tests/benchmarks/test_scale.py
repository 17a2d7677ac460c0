"""The simulation of questions past one machine: its arithmetic, and what it measures, on a tiny run."""

import itertools
from pathlib import Path

import pytest

from benchmarks import scale

COSTS = scale.Costs(read=1e-9, product=1e-6, part=1e-3, merge=1e-4, ship=1e-3, state_bytes=10_000)


def test_a_question_that_can_be_counted_by_hand() -> None:
    cluster = scale.Cluster(2, cores=2, memory=1e9, storage_rate=1e9, latency=0.5, network_rate=1e9)
    found = scale.simulate(COSTS, cluster, patterns=8_000_000, part_bytes=8 * 10**6 * scale.KEY_BYTES // 8)
    assert found.reading == pytest.approx(8e6 * scale.KEY_BYTES / 2e9 + 2 * 0.5)
    assert found.computing == pytest.approx((8 + 8 * 1e-3) / 4)
    assert found.asking == pytest.approx(8 * (1e-4 + 1e-5) + 4e-3)
    assert found.held == pytest.approx(0.4 * 2e9 / (8e6 * scale.KEY_BYTES))
    assert found.first == pytest.approx(found.reading + found.computing + found.asking)
    assert found.steady == pytest.approx(found.first - found.held * found.reading)
    assert found.bound == "storage"


def test_more_machines_hold_more_and_the_merging_stays() -> None:
    found = [scale.simulate(COSTS, scale.Cluster(count)) for count in (1, 4, 16, 64)]
    assert [each.held for each in found] == sorted(each.held for each in found)
    assert all(one.steady > other.steady for one, other in itertools.pairwise(found))
    assert found[-1].asking > found[0].asking
    assert scale.table(COSTS).count("\n") == 8


def test_every_cost_is_measured(tmp_path: Path) -> None:
    run = scale.record_keys(tmp_path / "run", patterns=8192, part_bytes=4 << 20)
    costs = scale.measure(run)
    assert len(run.parts()) > 1
    assert min(costs.read, costs.product, costs.merge, costs.state_bytes) > 0
