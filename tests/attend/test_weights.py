"""Group weights: within their budget, and every mask equal to the plain view's, whatever is kept."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dualform
from dualform.attend.removal import Removal, in_groups, split_into_bins
from helpers.small import network, recorded, train

# Every third step of these runs has no annotations, on purpose; what a mask says of that stands in test_unknown.py.
pytestmark = pytest.mark.filterwarnings("ignore::dualform.attend.warn.MaskWarning")

STEPS = 14
LABELS = st.lists(st.sampled_from([0, 1, 2, None]), max_size=3, unique=True)
RANGES = st.lists(
    st.tuples(st.integers(0, STEPS - 1), st.integers(1, STEPS)).map(lambda r: (r[0], r[0] + r[1])), max_size=2
)


@pytest.fixture(scope="module")
def memory(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "run"
    recorded(path, STEPS)
    return dualform.open(path)


def size(memory):
    return sum(4 * tensor.numel() for tensor in memory.weights().values())


@pytest.mark.parametrize(("shares", "bins"), [(0.5, 0), (1.9, 0), (2, 1), (3.5, 2), (1000, 14)])
def test_the_budget_decides_the_bins(memory, shares, bins):
    groups = 4  # three labels, and the patterns that have none
    plan = memory.group_weights("label", budget=int(shares * groups * size(memory))).plan
    assert plan.bins == bins
    assert plan.bytes <= plan.budget
    assert len(plan.groups) == groups


@pytest.mark.slow
@pytest.mark.parametrize("budget", [0, 3, 1000])
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(groups=LABELS, steps=RANGES, samples=st.lists(st.integers(0, 9), max_size=2, unique=True), only=st.booleans())
def test_a_removal_is_the_view_without_it(memory, budget, groups, steps, samples, only):
    """By subtraction of what is kept, by a pass over the rest, or by both."""
    removal = Removal(("label",), tuple(groups), tuple(steps), tuple(samples), only=only)
    weights = memory.group_weights("label", budget=budget * 4 * size(memory)).prepare()
    assert weights.ready is (budget > 1)
    found = weights.apply(memory._run.final, removal)
    sql = removal.sql()
    view = memory.where(sql) if only else memory.without(sql)
    for name, expected in view.weights().items():
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=2e-6)
    patterns = memory.where(sql).patterns("2").num_rows
    assert weights.patterns(removal, "2") == patterns


def test_what_is_covered_takes_no_pass(memory, monkeypatch):
    weights = memory.group_weights("label").prepare()
    from dualform.engine import rebuild

    monkeypatch.setattr(rebuild, "parts", lambda *a, **k: pytest.fail("a pass over the patterns"))
    weights.removed(Removal(("label",), (1,), ((3, 7),)))
    with pytest.raises(pytest.fail.Exception):
        weights.removed(Removal(("label",), samples=(3,)))


def test_the_start_can_be_dropped(memory):
    weights = memory.group_weights("label").prepare()
    found = weights.apply(memory._run.final, Removal(("label",), (0, 1, 2, None), only=True, keep_start=False))
    for name, share in memory.shares().items():
        torch.testing.assert_close(found[name], share, rtol=1e-4, atol=2e-6)


def test_an_elementwise_optimizer_has_group_weights_too(run):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    with dualform.record(model, optimizer, run, shard_bytes=1000) as recorder:
        train(model, optimizer, range(8), recorder)
    memory = dualform.open(run)
    final = memory._run.final
    assert final is not None
    found = memory.group_weights("task").prepare().apply(final, Removal(("task",), ("spät",), ((2, 4),)))
    expected = memory.without("task = 'spät' or (step >= 2 and step < 4)").weights()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)


def test_several_columns_and_bins(memory):
    weights = memory.group_weights(["task", "label"]).prepare()
    found = weights.apply(memory._run.final, Removal(("task", "label"), (("früh", 1), ("spät", 2))))
    expected = memory.without("(task = 'früh' and label = 1) or (task = 'spät' and label = 2)").weights()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=2e-6)


def test_rebuild_errors_are_those_of_verify(memory):
    checks = memory.rebuild_errors(memory.group_weights("label").prepare())
    for layer in memory.verify().layers:
        assert checks[layer.layer].passed
        assert checks[layer.layer].error == pytest.approx(layer.error, abs=2e-6)


def test_kept_weights_are_found_again_on_disk(memory, monkeypatch):
    memory.group_weights("label").prepare()
    again = dualform.open(memory.path).group_weights("label")
    from dualform.engine.local import LocalExecutor

    monkeypatch.setattr(LocalExecutor, "run", lambda *a, **k: pytest.fail("a pass over the patterns"))
    assert again.prepare().ready


def test_quotes_in_values_stay_values():
    assert in_groups(("task",), ["it's"]) == "(\"task\" = 'it''s')"
    assert in_groups(('a"b',), [1]) == '("a""b" = 1)'


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)).map(lambda r: (r[0], r[0] + r[1])), max_size=4),
    st.integers(1, 20),
)
def test_bins_and_rests_are_the_ranges(ranges, width):
    bins, rests = split_into_bins(ranges, width, 60)
    covered = {s for first in bins for s in range(first, min(first + width, 60))} | {
        s for a, b in rests for s in range(a, b)
    }
    assert covered == {s for a, b in ranges for s in range(a, min(b, 60))}
