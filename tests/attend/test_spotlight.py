"""Spotlights against the dense reference and against their own plain pass."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

import dualform
from dualform.attend import layer_plans
from dualform.attend.layer import LayerSpotlight
from dualform.attend.memory import Memory
from dualform.engine import local
from dualform.engine.answer_cache import AnswerCache
from dualform.engine.jobs import Pass
from dualform.engine.measures import PatternMeasure
from dualform.engine.plain import PlainExecutor
from dualform.engine.reducers import GroupSums
from dualform.errors import QueryError, SelectionError
from helpers.paired import STEPS, Pair
from helpers.reference import Pattern
from helpers.small import batch, network, recorded, sgd, train

# Every third step of these runs has no annotations, on purpose; what a mask says of that stands in test_unknown.py.
pytestmark = pytest.mark.filterwarnings("ignore::dualform.attend.warn.MaskWarning")

EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}
LAYERS = ("0", "2")
Keep = Callable[[Pattern], bool]
VIEWS: dict[str, tuple[Callable[[Memory], Memory], Keep, int]] = {
    "whole": (lambda m: m, lambda p: True, STEPS),
    "masked": (
        lambda m: m.without("row = 1 or mood > 0"),
        lambda p: not (p.row == 1 or (p.columns.get("mood") or 0) > 0),
        STEPS,
    ),
    "at 6": (lambda m: m.at(step=6), lambda p: True, 6),
    "masked at 6": (lambda m: m.where(label=[0, 1, None]).at(step=6), lambda p: p.columns.get("label") != 2, 6),
}
BY: dict[str, tuple[Any, Callable[[Pattern], Any]]] = {
    "label": ("label", lambda p: p.columns.get("label")),
    "task": ("task", lambda p: p.columns.get("task")),
    "mood": ("mood", lambda p: p.columns.get("mood")),
    "step": ("step", lambda p: p.step),
    "bins": (dualform.bins("step", width=4), lambda p: p.step // 4 * 4),
    "float bins": (
        dualform.bins("mood", width=0.75),
        lambda p: None if p.columns.get("mood") is None else math.floor(p.columns["mood"] / 0.75) * 0.75,
    ),
    "two": (["label", "task"], lambda p: (p.columns.get("label"), p.columns.get("task"))),
    "three": (
        ["task", dualform.bins("row", width=2), "micro"],
        lambda p: (p.columns.get("task"), p.row // 2 * 2, p.micro),
    ),
}


def look(pair: Pair, view: str, layer: str, **options: Any) -> LayerSpotlight:
    return VIEWS[view][0](pair.memory).attend(queries={layer: pair.queries(layer)}, **options)[layer]


# Everything, densely ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("view", VIEWS)
def test_attention_contributions_start_and_output(pair: Pair, view: str, layer: str) -> None:
    _, keep, horizon = VIEWS[view]
    reference, queries = pair.references[horizon], pair.queries(layer)
    found = look(pair, view, layer)
    assert found.count() == len(reference.of(layer, keep))
    torch.testing.assert_close(found.attention(), reference.attention(layer, queries, keep), **EXACT)
    contributions = reference.contributions(layer, queries, keep)
    torch.testing.assert_close(found.contributions(), contributions, **EXACT)
    weights = reference.weights(keep)
    expected = queries @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"]
    torch.testing.assert_close(found.output(), expected, **EXACT)
    torch.testing.assert_close(found.start() + contributions.sum(dim=1), expected, **EXACT)


def test_the_output_of_the_whole_is_what_the_module_computes(pair: Pair) -> None:
    inputs = pair.queries("0", rows=7)
    spot = pair.memory.attend(pair.model, inputs)
    hidden = pair.model[0](inputs)
    torch.testing.assert_close(spot["0"].output(), hidden.detach(), **EXACT)
    torch.testing.assert_close(spot["2"].output(), pair.model[2](torch.relu(hidden)).detach(), **EXACT)


# Totals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["attention", "magnitude", "contribution"])
@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("view", VIEWS)
def test_totals_are_the_references(pair: Pair, view: str, by: str, of: Any) -> None:
    _, keep, horizon = VIEWS[view]
    column, label = BY[by]
    for layer in LAYERS:
        expected = pair.references[horizon].totals(layer, pair.queries(layer), label, of, keep)
        totals = look(pair, view, layer).totals(by=column, of=of)
        assert set(totals.groups) == set(expected)
        assert len(totals.groups) == len(expected), "no group twice, none that is empty"
        for i, group in enumerate(totals.groups):
            torch.testing.assert_close(totals.values[:, i], expected[group], **EXACT)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("view", VIEWS)
def test_totals_and_start_make_the_output(pair: Pair, view: str, layer: str) -> None:
    found = look(pair, view, layer)
    for by, _ in BY.values():
        total = found.totals(by=by, of="contribution").values.sum(dim=1)
        torch.testing.assert_close(found.start() + total, found.output(), **EXACT)


def plain_totals(found: LayerSpotlight, by: Any, of: Any, chunk_size: int | None = None) -> Tensor:
    """Return totals of attention or magnitude by the streaming pass, without any shortcut."""
    table = found._table
    grouping = table.group(found.name, by)
    queries = found.queries
    job = Pass(
        found.name,
        table,
        GroupSums(len(grouping.labels)),
        queries,
        queries,
        PatternMeasure(of),
        groups=grouping,
        block_patterns=chunk_size,
    )
    return PlainExecutor().run(table.run, [job])[0]


@pytest.mark.parametrize("by", ["label", "three", "step"])
@pytest.mark.parametrize("view", VIEWS)
def test_the_key_sum_shortcut_equals_the_plain_pass(pair: Pair, view: str, by: str) -> None:
    for layer in LAYERS:
        found = look(pair, view, layer)
        torch.testing.assert_close(
            found.totals(by=BY[by][0]).values, plain_totals(found, BY[by][0], "attention"), **EXACT
        )


def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that every streaming pass over scores adds itself to."""
    seen: list[str] = []
    real = local.LocalExecutor._read_once

    def watched(self: local.LocalExecutor, source: Any, jobs: Any) -> Any:
        seen.extend(job.measure.of for job in jobs if job.measure is not None)
        return real(self, source, jobs)

    monkeypatch.setattr(local.LocalExecutor, "_read_once", watched)
    return seen


@pytest.mark.parametrize(
    ("sign_of_keys", "sign_of_queries", "short"),
    [(1, 1, True), (-1, -1, True), (1, -1, False), (-1, 1, False), (0, 1, False), (1, 0, False), (0, -1, False)],
)
def test_the_magnitude_shortcut_is_used_only_where_all_signs_agree_and_is_exact(
    run: Path, monkeypatch: pytest.MonkeyPatch, sign_of_keys: int, sign_of_queries: int, short: bool
) -> None:
    def signed(step: int, sign: int) -> Tensor:
        inputs = batch(step)[0]
        return sign * inputs.abs() if sign else inputs

    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = sgd(model)
    keys = []
    with dualform.record(model, optimizer, run, shard_bytes=500) as recorder:
        for step in range(6):
            keys.append(signed(step, sign_of_keys))
            recorder.annotate(sample=list(range(6)))
            optimizer.zero_grad()
            model(keys[-1]).square().mean().backward()
            optimizer.step()
    queries = signed(99, sign_of_queries)
    found = dualform.open(run).attend(queries={"": queries})[""]
    seen = passes(monkeypatch)
    values = found.totals(by="sample", of="magnitude").values
    assert (seen == []) is short
    expected = torch.stack([(queries @ torch.stack(keys)[:, i].T).abs().sum(dim=1) for i in range(6)], dim=1)
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-5)


def test_one_negative_query_or_key_is_enough_to_forbid_the_shortcut(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = recorded(run, 6)
    memory = dualform.open(run)
    hidden = torch.relu(model[0](batch(99)[0])).detach()
    seen = passes(monkeypatch)
    layer = memory.attend(queries={"2": hidden})["2"]
    layer.totals(by="label", of="magnitude")
    assert seen == [], "behind a ReLU"
    hidden[3, 1] = -1e-30
    layer = memory.attend(queries={"2": hidden})["2"]
    torch.testing.assert_close(
        layer.totals(by="label", of="magnitude").values, plain_totals(layer, "label", "magnitude").float(),
        rtol=1e-6, atol=1e-6,
    )  # fmt: skip
    assert seen == ["attention"], "its absolute is the magnitude"
    memory.attend(queries={"0": batch(99)[0].abs()})["0"].totals(by="label", of="magnitude")
    assert seen == ["attention"] * 2, "the keys of the first layer have both signs"


@pytest.mark.parametrize("view", VIEWS)
def test_contribution_totals_by_shares_equal_the_streaming_pass(
    pair: Pair, view: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = passes(monkeypatch)
    for layer in LAYERS:
        by_shares = look(pair, view, layer).totals(by="label", of="contribution").values
        output = look(pair, view, layer).output()
        assert seen == []
        with monkeypatch.context() as patch:
            patch.setattr(layer_plans, "MAX_SHARES_BYTES", 0)  # no share may be held
            found = look(pair, view, layer)
            torch.testing.assert_close(found.totals(by="label", of="contribution").values, by_shares, **EXACT)
            torch.testing.assert_close(found.output(), output, **EXACT)
            assert seen == ["contribution"] * 2
        seen.clear()


def test_few_queries_of_a_wide_layer_are_streamed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Linear(40, 30)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run):
        optimizer.zero_grad()
        model(torch.randn(5, 40)).square().mean().backward()
        optimizer.step()
    seen = passes(monkeypatch)
    inputs = torch.randn(40, 40)
    for rows, streamed in ((1, True), (40, False)):
        output = dualform.open(run).attend(model, inputs[:rows])[""].output()
        torch.testing.assert_close(output, model(inputs[:rows]).detach(), rtol=1e-5, atol=1e-6)
        assert (seen == ["contribution"]) is streamed
        seen.clear()


# Chunks -----------------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    chunk_size=st.integers(1, 30),
    block=st.integers(1, 6),
    layer=st.sampled_from(LAYERS),
    view=st.sampled_from(sorted(VIEWS)),
    by=st.sampled_from(sorted(BY)),
)
def test_no_answer_depends_on_the_chunks(
    pair: Pair, chunk_size: int, block: int, layer: str, view: str, by: str
) -> None:
    whole = look(pair, view, layer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "BLOCK_PATTERNS", chunk_size)  # of passes without queries
        patch.setattr(layer_plans, "MAX_PASS_QUERIES", block)
        cut = LayerSpotlight(
            whole._table,
            AnswerCache(whole._table.run),
            layer,
            pair_queries(whole),
            chunk_size=chunk_size,
        )
        patch.setattr(AnswerCache, "find", lambda self, what: None)
        column = BY[by][0]
        for of in ("attention", "magnitude", "contribution"):
            torch.testing.assert_close(cut.totals(by=column, of=of).values, whole_totals(whole, column, of), **EXACT)
        torch.testing.assert_close(cut.attention(), whole.attention(), rtol=0, atol=1e-14)
        torch.testing.assert_close(cut.output(), whole.output(), **EXACT)
        for options in ({}, {"by": column}, {"per": "sample"}, {"of": "contribution", "unit": 1}):
            torch.testing.assert_close(
                cut.top(4, **options).values, whole.top(4, **options).values, equal_nan=True, **EXACT
            )


def pair_queries(layer: LayerSpotlight) -> Any:
    from dualform.attend.queries import Captured

    return Captured(layer.queries, layer.leading)


def whole_totals(layer: LayerSpotlight, by: Any, of: Any) -> Tensor:
    return layer.totals(by=by, of=of).values


# Top --------------------------------------------------------------------------------------------------------------


def expected_scores(pair: Pair, view: str, layer: str, of: str, units: Tensor | None = None) -> Tensor:
    """Return every pattern's score, (Q, T), densely."""
    _, keep, horizon = VIEWS[view]
    reference, queries = pair.references[horizon], pair.queries(layer)
    if of == "contribution":
        each = reference.contributions(layer, queries, keep)
        assert units is not None
        return each[torch.arange(len(queries)), :, units]
    attention = reference.attention(layer, queries, keep)
    return attention.abs() if of == "magnitude" else attention


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("of", ["attention", "magnitude", "contribution"])
@pytest.mark.parametrize("view", VIEWS)
def test_top_patterns_have_the_best_scores(pair: Pair, view: str, of: Any, largest: bool) -> None:
    for layer in LAYERS:
        found = look(pair, view, layer)
        units = found.output().argmax(dim=1)
        scores = expected_scores(pair, view, layer, of, units)
        patterns = pair.references[VIEWS[view][2]].of(layer, VIEWS[view][1])
        top = found.top(5, of=of, largest=largest)
        best = scores.sort(dim=1, descending=largest).values[:, :5]
        torch.testing.assert_close(top.values[:, 0], best, **EXACT)
        numbers = look(pair, view, layer)._table.rows(layer, ["pattern"])["pattern"].to_pylist()
        for query in range(len(found)):
            chosen = [numbers.index(number) for number in top.patterns[query, 0].tolist()]
            assert len(set(chosen)) == 5
            torch.testing.assert_close(scores[query, chosen], best[query], **EXACT)  # ties may go to any of the tied
            for rank, place in enumerate(chosen):
                p, at = patterns[place], query * 5 + rank
                assert (top.columns["step"][at], top.columns["row"][at]) == (p.step, p.row)
                assert top.columns["label"][at] == p.columns.get("label")


@pytest.mark.parametrize("by", ["label", "two", "bins"])
def test_top_by_group_is_the_top_of_each_group(pair: Pair, by: str) -> None:
    column, label = BY[by]
    for layer in LAYERS:
        scores = expected_scores(pair, "whole", layer, "attention")
        labels = [label(p) for p in pair.reference.of(layer)]
        top = look(pair, "whole", layer).top(20, by=column)
        assert set(top.groups) == set(labels)
        for g, group in enumerate(top.groups):
            mine = scores[:, torch.tensor([found == group for found in labels])]
            best = mine.sort(dim=1, descending=True).values[:, :20]
            count = best.shape[1]
            torch.testing.assert_close(top.values[:, g, :count], best, **EXACT)
            assert bool(top.values[:, g, count:].isnan().all())
            assert bool((top.patterns[:, g, count:] == -1).all())


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("of", ["attention", "contribution"])
@pytest.mark.parametrize("view", VIEWS)
def test_top_samples_are_ranked_by_the_sum_over_their_occurrences(
    pair: Pair, view: str, of: Any, largest: bool
) -> None:
    for layer in LAYERS:
        found = look(pair, view, layer)
        scores = expected_scores(pair, view, layer, of, torch.ones(len(found), dtype=torch.int64))
        samples = [p.columns.get("sample") for p in pair.references[VIEWS[view][2]].of(layer, VIEWS[view][1])]
        assert None in samples, "patterns without a sample must not compete as one"
        names = sorted({sample for sample in samples if sample is not None})
        sums = torch.stack([scores[:, torch.tensor([s == name for s in samples])].sum(dim=1) for name in names], dim=1)
        top = found.top(4, of=of, per="sample", largest=largest, unit=1 if of == "contribution" else None)
        torch.testing.assert_close(top.values[:, 0], sums.sort(dim=1, descending=largest).values[:, :4], **EXACT)
        for query in range(len(found)):
            chosen = top.columns["sample"][query * 4 : query * 4 + 4]
            torch.testing.assert_close(sums[query, [names.index(s) for s in chosen]], top.values[query, 0], **EXACT)
            for rank, sample in enumerate(chosen):
                assert top.columns["occurrences"][query * 4 + rank] == samples.count(sample)


def test_top_samples_by_group_sum_within_the_group(pair: Pair) -> None:
    scores = expected_scores(pair, "whole", "0", "attention")
    patterns = pair.reference.of("0")
    top = look(pair, "whole", "0").top(3, by="task", per="sample")
    for g, task in enumerate(top.groups):
        sums: dict[Any, Tensor] = {}
        for t, p in enumerate(patterns):
            if p.columns.get("task") == task and p.columns.get("sample") is not None:
                sums[p.columns["sample"]] = sums.get(p.columns["sample"], 0) + scores[:, t]
        if not sums:
            assert bool((top.patterns[:, g] == -1).all())
            continue
        best = torch.stack(list(sums.values()), dim=1).sort(dim=1, descending=True).values[:, :3]
        torch.testing.assert_close(top.values[:, g], best, **EXACT)


def test_ties_go_to_different_patterns_with_the_same_score(run: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run, shard_bytes=0):
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(3, 5)).square().mean().backward()
            optimizer.step()
    top = dualform.open(run).attend(queries={"": torch.ones(2, 5)})[""].top(7)
    torch.testing.assert_close(top.values, torch.full((2, 1, 7), 5.0), rtol=0, atol=0)
    assert all(len(set(row)) == 7 for row in top.patterns[:, 0].tolist())


def test_more_than_there_are_is_filled_with_nothing(pair: Pair) -> None:
    found = pair.memory.where("step = 1 and row < 2").attend(queries={"0": pair.queries("0")})["0"]
    top = found.top(9)
    count = found.count()
    assert count == 4  # two backwards
    assert bool(top.values[:, 0, count:].isnan().all())
    assert not bool(top.values[:, 0, :count].isnan().any())
    assert top.columns["step"][count] is None
    assert top.to_arrow().num_rows == len(found) * count


def test_units_choose_the_output_whose_contribution_is_ranked(pair: Pair) -> None:
    layer = look(pair, "whole", "2")
    contributions = pair.reference.contributions("2", pair.queries("2"))  # (Q, T, 3)
    units = torch.tensor([0, 1, 2, 1])
    expected = contributions[torch.arange(4), :, units].amax(dim=1)
    torch.testing.assert_close(layer.top(1, of="contribution", unit=units).values[:, 0, 0], expected, **EXACT)
    torch.testing.assert_close(
        layer.top(1, of="contribution", unit=2).values[:, 0, 0], contributions[:, :, 2].amax(dim=1), **EXACT
    )
    largest = layer.output().argmax(dim=1)
    torch.testing.assert_close(
        layer.top(1, of="contribution").values, layer.top(1, of="contribution", unit=largest).values, rtol=0, atol=0
    )


@pytest.mark.parametrize("unit", [3, -1, torch.tensor([0, 1]), 0.5, torch.tensor([[0, 1, 2, 0]])])
def test_units_that_do_not_exist(pair: Pair, unit: Any) -> None:
    with pytest.raises(QueryError, match=r"[Uu]nit"):
        look(pair, "whole", "2").top(1, of="contribution", unit=unit)


def test_questions_that_make_no_sense(pair: Pair, run: Path) -> None:
    layer = look(pair, "whole", "0")
    with pytest.raises(QueryError, match=r"top\(0\) asks for no patterns"):
        layer.top(0)
    with pytest.raises(QueryError, match=r"of is 'score'; expected one of"):
        layer.totals(by="label", of="score")  # type: ignore[arg-type]
    with pytest.raises(QueryError, match=r"per is 'label'; expected one of"):
        layer.top(1, per="label")  # type: ignore[arg-type]
    model = network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        train(model, optimizer, [2], recorder)  # not annotated
    with pytest.raises(SelectionError, match=r'per="sample" needs a column "sample"'):
        dualform.open(run).attend(model, batch(0)[0])["0"].top(1, per="sample")


def test_answers_too_large_to_hold_are_refused_before_they_are_made(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_plans, "MAX_ANSWER_BYTES", 1000)
    layer = look(pair, "whole", "0")
    for question in (
        layer.attention,
        layer.contributions,
        lambda: layer.totals(by="pattern"),
        lambda: layer.totals(by="pattern", of="magnitude"),
        lambda: layer.totals(by="step", of="contribution"),
        lambda: layer.top(100),
        lambda: layer.top(10, by="step"),
        lambda: layer.top(100, per="sample"),
    ):
        with pytest.raises(QueryError, match=r"would take .* Use totals\(\) or top\(\), fewer queries") as caught:
            question()
        assert "\n" not in str(caught.value)


# Votes and tables -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["attention", "magnitude", "contribution"])
@pytest.mark.parametrize("by", ["label", "two"])
def test_a_vote_is_the_group_with_the_largest_total(pair: Pair, by: str, of: Any) -> None:
    column, label = BY[by]
    spot = pair.memory.attend(pair.model, pair.queries("0"))
    vote = spot.vote(by=column, of=of)
    for layer in LAYERS:
        queries = pair.queries(layer)
        totals = pair.reference.totals(layer, queries, label, of)
        for query, winner in enumerate(vote.winners[layer]):
            each = {group: total[query] for group, total in totals.items()}
            if of == "contribution":
                unit = int(pair.reference.output(layer, queries)[query].argmax())
                each = {group: total[unit] for group, total in each.items()}
            assert float(each[winner]) == pytest.approx(float(max(each.values())), rel=1e-9)
    table = vote.to_arrow()
    assert table.column_names == ["layer", "query", *([column] if by == "label" else column)]
    assert table.num_rows == 8
    assert vote.agreement(vote.winners["0"])["0"] == 1.0
    assert "Vote by" in repr(vote)


def test_answers_become_tables(pair: Pair) -> None:
    layer = look(pair, "whole", "2")
    totals = layer.totals(by=["label", "task"])
    table = totals.to_arrow().to_pylist()
    assert len(table) == totals.values.numel()
    for row in table:
        g = totals.groups.index((row["label"], row["task"]))
        assert row["attention"] == float(totals.values[row["query"], g])
    contributions = layer.totals(by="label", of="contribution")
    for row in contributions.to_arrow().to_pylist():
        g = contributions.groups.index(row["label"])
        assert row["contribution"] == float(contributions.values[row["query"], g, row["unit"]])
    top = layer.top(2, by="label")
    rows = top.to_arrow().to_pylist()
    assert {row["rank"] for row in rows} == {1, 2}
    assert all(row["by_label"] == row["label"] for row in rows)
    assert len(totals.to_pandas()) == len(table)
    for answer in (totals, contributions, top, layer):
        assert "'2'" in repr(answer)


def test_columns_named_like_ours_are_kept_beside_them(run: Path) -> None:
    model = network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        recorder.annotate(query=["a"] * 6, attention=[7] * 6, unit=[1.5] * 6, rank="r")
        train(model, optimizer, [2], recorder)
    layer = dualform.open(run).attend(model, batch(0)[0])["0"]
    row = layer.top(1).to_arrow().to_pylist()[0]
    assert (row["query"], row["query_"], row["rank"], row["rank_"]) == (0, "a", 1, "r")
    assert row["attention_"] == 7
    assert row["attention"] == pytest.approx(float(layer.attention()[0].max()))
    row = layer.totals(by=["query", "unit"], of="contribution").to_arrow().to_pylist()[1]
    assert (row["query"], row["query_"], row["unit"], row["unit_"]) == (0, "a", 1, 1.5)
