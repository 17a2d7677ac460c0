"""Memories and their views against the dense reference: weights, shares, masks, horizons."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import dualform
from dualform.attend.memory import Memory
from dualform.errors import KeysOnlyError, QueryError, SelectionError
from dualform.recording.baseline import Baseline
from helpers.paired import STEPS, Pair
from helpers.reference import Pattern
from helpers.small import batch, network, recorded, sgd, state, train

# Every third step of these runs has no annotations, on purpose; what a mask says of that stands in test_unknown.py.
pytestmark = pytest.mark.filterwarnings("ignore::dualform.attend.warn.MaskWarning")

EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}
Keep = Callable[[Pattern], bool]

VIEWS: dict[str, tuple[Callable[[Memory], Memory], Keep]] = {
    "whole": (lambda m: m, lambda p: True),
    "label": (lambda m: m.where(label=1), lambda p: p.columns.get("label") == 1),
    "labels": (lambda m: m.where(label=[0, 2]), lambda p: p.columns.get("label") in (0, 2)),
    "no label": (lambda m: m.where(label=None), lambda p: p.columns.get("label") is None),
    "none or one": (lambda m: m.where(label=[None, 1]), lambda p: p.columns.get("label") in (None, 1)),
    "not labelled": (lambda m: m.without(label=1), lambda p: p.columns.get("label") != 1),
    "sql": (lambda m: m.where("step >= 3 and row < 4"), lambda p: p.step >= 3 and p.row < 4),
    "not sql": (lambda m: m.without("mood > 0"), lambda p: not (p.columns.get("mood") or -1) > 0),
    "address": (lambda m: m.where(micro=1), lambda p: p.micro == 1),
    "both": (
        lambda m: m.where("row = 2", task="früh"),
        lambda p: p.row == 2 and p.columns.get("task") == "früh",
    ),
    "neither": (
        lambda m: m.without("row = 2", task="früh"),
        lambda p: not (p.row == 2 and p.columns.get("task") == "früh"),
    ),
    "composed": (
        lambda m: m.where("step > 1").without(label=2).where(task=["früh", "spät"]),
        lambda p: p.step > 1 and p.columns.get("label") != 2 and p.columns.get("task") is not None,
    ),
    "nothing": (lambda m: m.where("false"), lambda p: False),
}


@pytest.mark.parametrize("view", VIEWS)
def test_weights_and_shares_of_a_view_are_the_references(pair: Pair, view: str) -> None:
    look, keep = VIEWS[view]
    memory = look(pair.memory)
    shares, weights = memory.shares(), memory.weights()
    assert set(shares) == set(weights) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    for name, expected in pair.reference.shares(keep).items():
        torch.testing.assert_close(shares[name], expected, **EXACT)
    for name, expected in pair.reference.weights(keep).items():
        torch.testing.assert_close(weights[name], expected, **EXACT)


@pytest.mark.parametrize("horizon", [0, 3, 6, STEPS])
@pytest.mark.parametrize("view", ["whole", "label", "not sql", "composed"])
def test_a_view_at_a_step_is_the_training_that_stopped_there(pair: Pair, view: str, horizon: int) -> None:
    look, keep = VIEWS[view]
    reference = pair.references[horizon]
    for memory in (look(pair.memory).at(step=horizon), look(pair.memory.at(step=horizon))):
        assert memory.step == horizon
        for name, expected in reference.shares(keep).items():
            torch.testing.assert_close(memory.shares()[name], expected, **EXACT)
        for name, expected in reference.weights(keep).items():
            torch.testing.assert_close(memory.weights()[name], expected, **EXACT)
        assert memory.patterns("0").num_rows == len(reference.of("0", keep))
        assert memory.steps().num_rows == 4 * horizon


@pytest.mark.parametrize("step", range(STEPS + 1))
def test_the_weights_at_a_step_are_the_checkpoint_of_that_step(pair: Pair, step: int) -> None:
    for name, expected in pair.reference.history[step].items():
        torch.testing.assert_close(pair.memory.at(step=step).weights()[name], expected, **EXACT)


@pytest.mark.parametrize("view", VIEWS)
def test_the_pattern_table_of_a_view_has_the_references_rows(pair: Pair, view: str) -> None:
    look, keep = VIEWS[view]
    for layer in ("0", "2"):
        table = look(pair.memory).patterns(layer).to_pylist()
        expected = pair.reference.of(layer, keep)
        assert [(row["step"], row["micro"], row["call"], row["row"], row["position"]) for row in table] == [
            (p.step, p.micro, p.call, p.row, p.position) for p in expected
        ]
        for row, p in zip(table, expected, strict=True):
            for name in ("sample", "label", "task", "mood"):
                assert row[name] == p.columns.get(name)


def test_pattern_numbers_count_over_shards_and_survive_masks(pair: Pair) -> None:
    assert len(pair.memory._run.parts()) > 2
    count = len(pair.reference.of("0"))
    assert pair.memory.patterns("0")["pattern"].to_pylist() == list(range(count))
    chosen = pair.memory.where("pattern % 5 = 3")
    assert chosen.patterns("0")["pattern"].to_pylist() == list(range(3, count, 5))
    assert pair.memory.where(pattern=[50, 7]).patterns("2")["pattern"].to_pylist() == [7, 50]


# where + without = whole ------------------------------------------------------------------------------------------

labels = st.sampled_from([0, 1, 2, 7, None])
keywords = st.fixed_dictionaries(
    {},
    optional={
        "label": labels | st.lists(labels, max_size=4) | st.sets(st.integers(0, 3)),
        "sample": st.lists(st.integers(0, 12), max_size=6).map(np.array) | st.integers(0, 9).map(torch.tensor),
        "task": st.sampled_from(["früh", "spät", "nie", None]),
        "mood": st.sampled_from([-1.0, 0.5, None]) | st.just([0.0, 1.5]),
        "step": st.integers(0, STEPS) | st.just(range(2, 5)),
        "row": st.tuples(st.integers(0, 6), st.integers(0, 6)),
    },
)
atoms = st.sampled_from(
    [
        *(
            "mood > 0",
            "mood is null",
            "not (mood < 1)",
            "label = 1",
            "label <> 1",
            "label in (0, 2)",
            "label is not null",
        ),
        *("task like 's%'", "task = 'früh' or mood = 0.5", "step between 2 and 6", "sample % 3 = 1", "null", "true"),
        *("coalesce(mood, 9) > 1", "row + position < 3", "case when label = 1 then true end", "false -- nothing"),
    ]
)
conditions = st.recursive(
    atoms,
    lambda inner: (
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda t: f"({t[0]}\n) {t[1]} ({t[2]}\n)")
        | inner.map(lambda text: f"not ({text}\n)")
    ),
    max_leaves=4,
)


@pytest.mark.slow
@settings(max_examples=25)
@given(sql=st.none() | conditions, equal=keywords, horizon=st.sampled_from([2, 7, STEPS]))
def test_where_and_without_part_the_whole(pair: Pair, sql: str | None, equal: dict[str, Any], horizon: int) -> None:
    memory = pair.memory.at(step=horizon)
    if sql is None and not equal:
        with pytest.raises(SelectionError, match="Nothing to select by"):
            memory.where(sql, **equal)
        return
    inside, outside = memory.where(sql, **equal), memory.without(sql, **equal)
    whole, weights = memory.shares(), memory.weights()
    of_inside, of_outside, inside_weights = inside.shares(), outside.shares(), inside.weights()
    for name, share in of_inside.items():
        torch.testing.assert_close(share + of_outside[name], whole[name], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(inside_weights[name] + of_outside[name], weights[name], rtol=1e-12, atol=1e-13)
    for layer in ("0", "2"):
        numbers = [view.patterns(layer)["pattern"].to_pylist() for view in (inside, outside)]
        assert sorted(numbers[0] + numbers[1]) == memory.patterns(layer)["pattern"].to_pylist()
    # Leaving out twice leaves nothing; the complement of the complement is the view.
    again = inside.where(sql, **equal)
    assert again.patterns("0")["pattern"].to_pylist() == numbers_of(inside)
    assert numbers_of(outside.where(sql, **equal)) == []


def numbers_of(memory: Memory) -> list[int]:
    found: list[int] = memory.patterns("0")["pattern"].to_pylist()
    return found


@pytest.mark.slow
@settings(max_examples=10)
@given(first=conditions, second=conditions)
def test_views_compose_in_any_order(pair: Pair, first: str, second: str) -> None:
    one = pair.memory.where(first).without(second)
    other = pair.memory.without(second).where(first)
    kept = set(numbers_of(pair.memory.where(first))) - set(numbers_of(pair.memory.where(second)))
    assert numbers_of(one) == numbers_of(other) == sorted(kept)
    shares, others = one.shares(), other.shares()
    for name, share in shares.items():
        torch.testing.assert_close(share, others[name], rtol=0, atol=0)


def test_tensors_arrays_and_sets_select_as_lists_do(pair: Pair) -> None:
    expected = numbers_of(pair.memory.where(sample=[3, 5]))
    for value in (torch.tensor([3, 5]), np.array([5, 3]), {3, 5}, (3, 5), range(3, 6, 2), frozenset({3, 5})):
        assert numbers_of(pair.memory.where(sample=value)) == expected
    assert numbers_of(pair.memory.where(sample=torch.tensor(3))) == numbers_of(pair.memory.where(sample=3))
    assert numbers_of(pair.memory.where(sample=np.int64(3))) == numbers_of(pair.memory.where(sample=3))
    assert numbers_of(pair.memory.where(sample=[])) == []
    assert numbers_of(pair.memory.without(sample=[])) == numbers_of(pair.memory)


def test_views_are_immutable_and_describe_themselves(pair: Pair) -> None:
    before = pair.memory.weights()
    view = pair.memory.where(label=1).without("step < 2").at(step=6)
    words = "label = 1; not (step < 2); at step 6; 24 patterns have no value in the mask's columns)"
    assert repr(view).endswith(words)
    assert view.info().view == "label = 1; not (step < 2); at step 6"
    assert pair.memory.info().view == ""
    assert pair.memory.step == STEPS
    for name, weight in pair.memory.weights().items():
        torch.testing.assert_close(weight, before[name], rtol=0, atol=0)


def test_answers_may_be_changed_without_changing_the_memory(pair: Pair) -> None:
    memory = dualform.open(pair.path)
    expected = {name: tensor.clone() for name, tensor in memory.shares().items()}
    for tensor in [*memory.shares().values(), *memory.weights().values()]:
        tensor.zero_()
    for name, tensor in memory.shares().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)


# apply ------------------------------------------------------------------------------------------------------------


def test_apply_returns_a_copy_with_the_views_weights(pair: Pair) -> None:
    view = pair.memory.without(label=2)
    before = state(pair.model)
    masked = view.apply(pair.model)
    for name, weight in view.weights().items():
        torch.testing.assert_close(masked.get_parameter(name).detach(), weight, rtol=0, atol=0)
        torch.testing.assert_close(pair.model.get_parameter(name).detach(), before[name], rtol=0, atol=0)
    assert masked is not pair.model
    assert masked.get_parameter("0.weight").requires_grad
    whole = pair.memory.apply(pair.model)
    inputs = pair.queries("0")
    torch.testing.assert_close(whole(inputs), pair.model(inputs), rtol=1e-10, atol=1e-11)


def test_apply_to_some_layers_leaves_the_others(pair: Pair) -> None:
    view = pair.memory.where(label=1)
    masked = view.apply(pair.model, layers=["2"])
    torch.testing.assert_close(masked.get_parameter("2.bias").detach(), view.weights()["2.bias"], rtol=0, atol=0)
    torch.testing.assert_close(masked.get_parameter("0.bias"), pair.model.get_parameter("0.bias"), rtol=0, atol=0)


# Keys only --------------------------------------------------------------------------------------------------------


@pytest.fixture
def mixed(run: Path) -> tuple[Memory, nn.Sequential]:
    """A run whose first layer was recorded with its keys only."""
    model = recorded(run, 6, layers={"0": "keys", "2": "keys+values"})
    return dualform.open(run), model


def test_a_layer_with_keys_only_has_attention_and_nothing_more(mixed: tuple[Memory, nn.Sequential]) -> None:
    memory, model = mixed
    inputs = batch(500)[0]
    layer = memory.attend(model, inputs)["0"]
    keys = torch.cat([batch(step)[0] for step in range(6)])
    torch.testing.assert_close(layer.attention(), inputs @ keys.T, rtol=1e-6, atol=1e-6)
    table = memory.patterns("0").to_pylist()
    mine = torch.tensor([row["label"] == 1 for row in table])
    totals = layer.totals(by="label")
    torch.testing.assert_close(
        totals.values[:, totals.groups.index(1)], (inputs @ keys[mine].T).sum(dim=1), rtol=1e-5, atol=1e-5
    )
    assert layer.top(3).patterns.shape == (6, 1, 3)
    for question in (
        layer.contributions,
        layer.output,
        layer.start,
        lambda: layer.totals(by="label", of="contribution"),
        lambda: layer.top(1, of="contribution"),
        lambda: memory.apply(model),
        lambda: memory.attend(model, inputs).vote(by="label", of="contribution"),
    ):
        with pytest.raises(KeysOnlyError, match=r"Layer '0' was recorded with its keys only") as caught:
            question()
        assert "\n" not in str(caught.value)


def test_beside_it_the_other_layers_are_whole(mixed: tuple[Memory, nn.Sequential]) -> None:
    memory, model = mixed
    assert memory.verify(model).passed
    assert [layer.error is None for layer in memory.verify(model).layers] == [True, False]
    assert "keys only" in repr(memory.verify(model))
    assert set(memory.weights()) == {"2.weight", "2.bias"}
    layer = memory.attend(model, batch(500)[0])["2"]
    torch.testing.assert_close(layer.output(), model(batch(500)[0]).detach(), rtol=1e-5, atol=1e-6)
    masked = memory.where(label=1).apply(model, layers=["2"])
    torch.testing.assert_close(
        masked.get_parameter("2.weight").detach(), memory.where(label=1).weights()["2.weight"], rtol=0, atol=0
    )


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_a_run_of_keys_only_verifies_its_files_and_has_no_weights(
    run: Path, optimizer: Callable[..., torch.optim.Optimizer]
) -> None:
    model = network()
    made = optimizer(model.parameters(), lr=0.01)
    with dualform.record(model, made, run, layers={"*": "keys"}) as recorder:
        train(model, made, range(4), recorder)
    memory = dualform.open(run)
    assert memory.verify(model).passed
    assert memory.verify().passed
    for question in (memory.weights, memory.shares, lambda: memory.apply(model), memory.where(label=1).weights):
        with pytest.raises(KeysOnlyError, match="keys only"):
            question()
    assert memory.attend(model, batch(9)[0]).vote(by="label").winners.keys() == {"0", "2"}


# What there is ----------------------------------------------------------------------------------------------------


def test_info_and_columns_say_what_there_is(pair: Pair) -> None:
    info = pair.memory.info()
    assert info.steps == STEPS
    assert info.closed
    assert info.columns == {"sample": "int64", "label": "int64", "task": "string", "mood": "double"}
    assert info.layers["2"]["patterns"] == len(pair.reference.of("2"))
    assert info.bytes == sum(path.stat().st_size for path in pair.path.rglob("*.[ps]*") if "cache" not in path.parts)
    assert "11 steps" in repr(info)
    assert pair.memory.columns == (
        *("pattern", "step", "micro", "call", "row", "position"),
        *("sample", "label", "task", "mood"),
    )
    assert pair.memory.patterns("0", columns=["mood", "row"]).column_names == ["mood", "row"]


def test_a_memory_without_a_model_needs_its_factory(pair: Pair) -> None:
    assert pair.memory.factory is None


def test_the_trained_model_is_had_to_the_bit(run: Path) -> None:
    model = recorded(run, 5)
    again = dualform.open(run).trained(network(seed=3))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(again.get_parameter(name), parameter, rtol=0, atol=0)


def test_two_wrong_ways_to_attend(pair: Pair) -> None:
    inputs = pair.queries("0")
    for arguments in ({"model": pair.model}, {"inputs": inputs}, {}):
        with pytest.raises(QueryError, match="either a model and inputs, or queries"):
            pair.memory.attend(**arguments)
    with pytest.raises(QueryError, match="either a model and inputs, or queries"):
        pair.memory.attend(pair.model, inputs, queries={"0": inputs})


def test_weights_cannot_be_asked_of_parameters_that_move_outside_the_optimizer(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the recorder overlooks, `verify` says."""
    monkeypatch.setattr(Baseline, "changed", lambda self, **_: [])
    model = network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        train(model, optimizer, range(2), recorder)
        with torch.no_grad():
            model.get_parameter("0.weight").mul_(1.01)
        train(model, optimizer, range(2, 4), recorder)
    check = dualform.open(run).verify(model)
    assert not check.passed
    assert [p.parameter for layer in check.layers for p in layer.parameters if not p.passed] == ["0.weight"]
