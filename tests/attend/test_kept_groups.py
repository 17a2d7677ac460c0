"""A memory that keeps shares alone answers by group what a memory of patterns does, and refuses the rest by name."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from dualform.attend.memory import Memory
from dualform.engine.jobs import Executor, Fold, Job, Pass, WholeView
from dualform.engine.local import LocalExecutor
from dualform.engine.plain import PlainExecutor
from dualform.engine.reducers import KeySums
from dualform.engine.shares import SharesOf
from dualform.errors import DualformError, SelectionError, SharesOnlyError
from dualform.recording.keep import Shares
from dualform.store.memory_blobs import MemoryBlobs
from helpers.manifests import write_manifest
from helpers.paired import Pair
from helpers.shares_only import DictionaryShares, SharesOnly, planted, shares_only
from helpers.small import batch, network, sgd
from helpers.small_models import record_letters

View = Callable[[Memory], Memory]
AT = (3, 6)
VIEWS: dict[str, View] = {
    "whole": lambda memory: memory,
    "equal": lambda memory: memory.where(label=1),
    "without": lambda memory: memory.without(task="früh"),
    "set": lambda memory: memory.without(label=[0, 2]),
    "null": lambda memory: memory.where(label=None),
    "sql": lambda memory: memory.where("label > 0 or label is null"),
    "two": lambda memory: memory.without("task = 'spät'").without(label=2),
    "both": lambda memory: memory.without("label <> 1", task="früh"),
    "nothing": lambda memory: memory.where(label=77),
    "early": lambda memory: memory.at(step=6).without(label=1),
}


@pytest.fixture(scope="module")
def kept(pair: Pair) -> Memory:
    """The run of eleven steps, of which shares by task and label and by bins of five steps are kept."""
    return shares_only(pair.memory, ["task", "label"], ["label"], [dualform.bins("step", width=5)], at=AT)


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_those_of_the_patterns(pair: Pair, kept: Memory, name: str) -> None:
    mine, whole = VIEWS[name](kept).unwarned(), VIEWS[name](pair.memory).unwarned()
    for parameter, weight in whole.weights().items():
        close(mine.weights()[parameter], weight)
        close(mine.shares()[parameter], whole.shares()[parameter])
    assert mine.unknown() == whole.unknown()
    masked, expected = mine.apply(pair.model), whole.apply(pair.model)
    for one, other in zip(masked.parameters(), expected.parameters(), strict=True):
        close(one, other)
    for layer in kept.layers:
        queries = {layer: pair.queries(layer)}
        spot, truth = mine.attend(queries=queries)[layer], whole.attend(queries=queries)[layer]
        assert spot.count() == truth.count()
        close(spot.output(), truth.output())
        close(spot.start(), truth.start())
        if truth.count():
            for by in ("label", "task", ["label", "task"]):
                for of in ("attention", "contribution"):
                    found, wanted = spot.totals(by, of=of), truth.totals(by, of=of)
                    assert found.groups == wanted.groups
                    assert found.by == wanted.by
                    close(found.values, wanted.values)


def test_shares_by_a_column_and_a_vote(pair: Pair, kept: Memory) -> None:
    for name, found in kept.shares(by="task").items():
        wanted = pair.memory.shares(by="task")[name]
        assert found.labels == wanted.labels == ("früh", "spät", None)
        close(found.shares, wanted.shares)
        close(found.start + found.shares.sum(dim=0) + found.unexplained + found.rounding, kept.weights()[name])
    queries = {layer: pair.queries(layer) for layer in kept.layers}
    votes = [memory.attend(queries=queries).vote("label").winners for memory in (kept, pair.memory)]
    assert votes[0] == votes[1]


def test_magnitude_needs_keys_and_queries_that_are_not_negative(pair: Pair, kept: Memory) -> None:
    behind_relu = {"2": pair.queries("2")}
    found = kept.attend(queries=behind_relu)["2"].totals("label", of="magnitude")
    close(found.values, pair.memory.attend(queries=behind_relu)["2"].totals("label", of="magnitude").values)
    for queries in ({"0": pair.queries("0").abs()}, {"2": -pair.queries("2")}):
        (layer,) = queries
        with pytest.raises(SharesOnlyError, match=f"Layer '{layer}' keeps shares .* magnitude, which sums of keys"):
            kept.attend(queries=queries)[layer].totals("label", of="magnitude")


def test_bins_are_groups_and_their_unions_are_masks(pair: Pair, kept: Memory) -> None:
    wide = dualform.bins("step", width=10)
    for layer in kept.layers:
        queries = {layer: pair.queries(layer)}
        found, wanted = (m.attend(queries=queries)[layer].totals(wide) for m in (kept, pair.memory))
        assert found.groups == wanted.groups == (0, 10)
        close(found.values, wanted.values)
    for condition in ("step < 5", "step >= 5 and step <= 9", "not step between 5 and 9", "step >= 10 and step < 11"):
        for name, weight in pair.memory.where(condition).weights().items():
            close(kept.where(condition).weights()[name], weight)
    with pytest.raises(SharesOnlyError, match=r"cuts through the group 0 of step:5"):
        kept.where("step < 3")
    with pytest.raises(SharesOnlyError, match=r"needs groups by 'step:3'"):
        kept.attend(queries={"0": pair.queries("0")})["0"].totals(dualform.bins("step", width=3))


REFUSED: dict[str, tuple[Callable[[Memory, Pair], Any], str]] = {
    "another column": (lambda m, p: m.without(sample=3), "needs groups by 'sample'"),
    "two groupings": (lambda m, p: m.where("task = 'früh' and step < 5"), "needs groups by 'step', 'task'"),
    "an unknown column": (lambda m, p: m.where("kind = 3"), "no column 'kind'"),
    "another step": (lambda m, p: m.at(step=4), r"keeps shares after steps 3, 6, 11, and not after step 4"),
    "a table": (lambda m, p: m.patterns("0"), "a table of patterns needs patterns"),
    "groups": (lambda m, p: m.count_groups("0", "sample"), "needs groups by 'sample'"),
    "top": (lambda m, p: m.attend(queries={"0": p.queries("0")})["0"].top(3), "a ranking of patterns needs patterns"),
    "all attention": (lambda m, p: m.attend(queries={"0": p.queries("0")})["0"].attention(), "needs patterns"),
    "contributions": (lambda m, p: m.attend(queries={"0": p.queries("0")})["0"].contributions(), "needs patterns"),
    "samples": (
        lambda m, p: m.attend(queries={"0": p.queries("0")})["0"].top(3, per="sample"),
        "a ranking of patterns needs",
    ),
    "effects": (
        lambda m, p: m.attend(p.model, p.queries("0"), quantity="margin")["0"].effects(by="label"),
        "has no effects: its patterns are not kept; record them too",
    ),
    "all effects": (
        lambda m, p: m.attend(p.model, p.queries("0"), quantity="margin").effects(by="label"),
        "No layer of the linear family",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_patterns_is_refused_by_name(pair: Pair, kept: Memory, name: str) -> None:
    ask, text = REFUSED[name]
    with pytest.raises(DualformError, match=text):
        ask(kept, pair)


def test_a_run_may_keep_shares_of_one_layer_and_patterns_of_another(pair: Pair) -> None:
    mixed = shares_only(pair.memory, "label", at=AT, patterns=["2"])
    queries = {layer: pair.queries(layer) for layer in mixed.layers}
    best = mixed.attend(queries=queries)["2"].top(3)
    close(best.values, pair.memory.attend(queries=queries)["2"].top(3).values)
    with pytest.raises(SharesOnlyError, match=r"Record them too: keep=\[dualform.Shares"):
        mixed.attend(queries=queries)["0"].top(3)
    for name, weight in pair.memory.without(label=1).unwarned().weights().items():
        close(mixed.without(label=1).unwarned().weights()[name], weight)
    only_patterns = mixed.where("sample < 3").unwarned()  # a mask of the layer that has patterns
    assert only_patterns.attend(queries={"2": queries["2"]})["2"].count()
    with pytest.raises(SharesOnlyError, match="needs groups by 'sample'"):
        only_patterns.weights()
    assert mixed.verify(pair.model).passed


def test_verify_passes_where_nothing_is_left_unexplained(pair: Pair, kept: Memory) -> None:
    outcome = kept.verify(pair.model)
    assert outcome.passed, outcome
    assert "unexplained" in repr(outcome)
    assert outcome.explained is None
    assert [layer.patterns for layer in outcome.layers] == [
        kept.attend(queries={"0": pair.queries("0")})["0"].count()
    ] * 2
    assert kept.info().layers["0"]["store"] == "shares"
    assert kept.at(step=3).verify(pair.references[3].weights()).passed


@pytest.mark.parametrize("rounding", [False, True], ids=["unexplained", "rounding"])
def test_verify_says_how_much_is_explained(pair: Pair, rounding: bool) -> None:
    trained = pair.model.state_dict()
    change = trained["0.weight"] - pair.memory._run.initial["0.weight"]
    memory = planted(pair.memory, "0.weight", "label", 0.3 * change, rounding=rounding)
    outcome = memory.verify(pair.model)
    assert not outcome.passed
    (layer,) = [one for one in outcome.layers if not one.passed]
    bias = float((trained["0.bias"] - pair.memory._run.initial["0.bias"]).norm())
    both = float(change.norm()) ** 2 + bias**2
    assert layer.explained == pytest.approx(1 - 0.09 * float(change.norm()) ** 2 / both)
    assert (layer.rounding if rounding else layer.unexplained) > 0.2  # type: ignore[operator]
    assert layer.result.startswith("explains 9")
    assert outcome.verdict.startswith("explains 9")
    assert "'0.weight'" in repr(outcome)


def test_what_is_recorded_says_how_much_it_explains(tmp_path: Path) -> None:
    """A regulariser is unexplained, and Muon's own rounding is within its bound."""
    for name in ("muon", "regulariser"):
        model = network()
        matrices, biases = ([p for p in model.parameters() if p.dim() == n] for n in (2, 1))
        optimizers: list[torch.optim.Optimizer] = (
            [torch.optim.Muon(matrices, lr=0.01), torch.optim.SGD(biases, lr=0.1)] if name == "muon" else [sgd(model)]
        )
        with dualform.record(model, optimizers, tmp_path / name, keep=Shares(by="label")) as recorder:
            for step in range(8):
                inputs, labels = batch(step)
                recorder.annotate(label=labels)
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss = functional.cross_entropy(model(inputs), labels)
                (loss if name == "muon" else loss + 1e-3 * matrices[0].square().sum()).backward()
                for optimizer in optimizers:
                    optimizer.step()
        outcome = dualform.open(tmp_path / name).verify(model)
        if name == "muon":
            assert outcome.passed, outcome
            assert (outcome.layers[0].rounding or 0.0) > 1e-5
        else:
            assert [layer.passed for layer in outcome.layers] == [False, True]
            assert outcome.layers[0].result.startswith("explains 9")
            assert outcome.hint == ""


def test_verify_fails_where_the_sum_is_not_the_weight(pair: Pair, kept: Memory) -> None:
    other = {name: tensor + 0.1 for name, tensor in pair.model.state_dict().items()}
    outcome = kept.verify(other)
    assert outcome.verdict == "FAILED"
    assert outcome.explained is None


def test_a_run_that_was_cut_off_is_looked_at_after_its_last_shares(pair: Pair) -> None:
    run = pair.memory._run
    cut = Memory(SharesOnly(run, DictionaryShares(pair.memory, ["label"], [3, 6])))
    assert cut.step == 6
    assert "at step 6" in repr(cut)
    for name, weight in pair.memory.at(step=6).weights().items():
        close(cut.weights()[name], weight)
    assert cut.info().layers["0"]["patterns"] == pair.memory.at(step=6).patterns("0").num_rows
    none = Memory(SharesOnly(run, DictionaryShares(pair.memory, ["label"], [])))
    assert none.info().layers["0"]["patterns"] == 0
    with pytest.raises(DualformError, match="keeps shares not after step 11"):
        none.weights()


@pytest.mark.parametrize("column", ["sample", "site"])  # numbers and texts
def test_a_rest_of_groups_is_a_group_that_no_condition_can_look_into(tmp_path: Path, column: str) -> None:
    def recorded(name: str, keep: Shares | None) -> tuple[Memory, nn.Module]:
        model = network()
        optimizer = sgd(model)
        with dualform.record(model, optimizer, tmp_path / name, keep=keep) as recorder:
            for step in range(6):
                inputs, labels = batch(step)
                recorder.annotate(sample=labels * 10, site=[f"site {label}" for label in labels.tolist()])
                optimizer.zero_grad()
                functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
        return dualform.open(tmp_path / name), model

    whole, _ = recorded("patterns", None)
    kept, model = recorded("shares", Shares(by=column, groups=2, rest=True))
    assert kept.verify(model).passed
    found = kept.shares(by=column)["0.weight"]
    first, second = [label for label in found.labels if label != "rest"]
    assert len(found.labels) == 3
    views: list[View] = [lambda m: m.without(**{column: first}), lambda m: m.where(**{column: [second]})]
    for view in views:
        for name, weight in view(whole).weights().items():
            torch.testing.assert_close(view(kept).weights()[name], weight, rtol=0, atol=1e-5)
    other = next(label for label in whole.shares(by=column)["0.weight"].labels if label not in found.labels)
    refused: list[View] = [lambda m: m.without(**{column: other}), lambda m: m.where(f"{column} is null")]
    for view in refused:
        with pytest.raises(SharesOnlyError, match="cannot be decided for the group 'rest'"):
            view(kept)


@pytest.mark.parametrize("earlier_version", [False, True])
def test_a_users_own_rest_stays_apart_from_the_group_of_all_others(tmp_path: Path, earlier_version: bool) -> None:
    names = ["a", "rest", "z"]
    model = network()
    optimizer = sgd(model)
    keep = Shares(by=[["site"], ["label"]], groups=2, rest=True)
    with dualform.record(model, optimizer, tmp_path / "run", keep=keep) as recorder:
        for step in range(3):
            inputs, labels = batch(step)
            numbers = torch.arange(len(labels)) % 3
            recorder.annotate(site=[names[number] for number in numbers.tolist()], label=numbers)
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    if earlier_version:  # which had "rest" twice
        document = json.loads((tmp_path / "run" / "manifest.json").read_text().replace("(rest)", "rest"))
        write_manifest(tmp_path / "run", document)
    memory = dualform.open(tmp_path / "run")
    by_site, by_number = (memory.shares(by=column)["0.weight"] for column in ("site", "label"))
    assert by_site.labels == ("(rest)", "a", "rest")
    assert by_number.labels == (0, 1, "rest")
    for site, number in (("a", 0), ("rest", 1), ("(rest)", "rest")):
        of = by_site.shares[by_site.labels.index(site)], by_number.shares[by_number.labels.index(number)]
        torch.testing.assert_close(*of, rtol=0, atol=1e-6)
    masked = memory.without(site="rest").weights()["0.weight"]
    torch.testing.assert_close(masked, memory.without(label=1).weights()["0.weight"], rtol=0, atol=1e-6)


def test_a_text_needs_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = Shares(by="token")
    monkeypatch.setattr(dualform, "record", functools.partial(dualform.record, keep=keep), raising=False)
    model = record_letters(tmp_path / "run", steps=4)
    memory = dualform.open(tmp_path / "run")
    assert memory.verify(model).passed
    assert memory.attend(model, memory.tests()[0])["table"].totals("token", of="contribution").values.dim() == 3
    questions: list[Callable[[], Any]] = [
        lambda: memory.attend_text(model, "the "),
        lambda: memory.place_counts("out"),
        lambda: memory.place_totals("out", torch.zeros(1, 8)),
        lambda: memory.attend(model, memory.tests()[0])["table"].totals("token"),
    ]
    for ask in questions:
        with pytest.raises(SharesOnlyError, match="keeps shares by token and no patterns"):
            ask()


@pytest.mark.parametrize("executor", [PlainExecutor(), LocalExecutor()], ids=["plain", "local"])
def test_executors_refuse_a_layer_without_patterns(kept: Memory, executor: Executor) -> None:
    source = kept._run
    like = torch.empty(0, dtype=torch.float64)
    jobs: list[Job] = [
        Pass("0", WholeView(source, source.steps), KeySums(1, 5), like),
        Fold(("0.weight",), source.steps, SharesOf(1)),
    ]
    for job in jobs:
        with pytest.raises(SharesOnlyError, match="Layer '0' keeps shares"):
            executor.run(source, [job])
    with pytest.raises(SharesOnlyError, match="Layer '0' keeps shares"):
        WholeView(source, source.steps).count("0")


def test_a_column_that_was_never_given_is_refused_by_name() -> None:
    blobs = MemoryBlobs()
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, blobs, keep=dualform.Shares(by="source")):
        model(torch.ones(5, 4)).square().mean().backward()
        optimizer.step()
    memory = dualform.open(blobs)
    assert memory.verify(model).passed
    with pytest.raises(SelectionError, match="source"):
        memory.attend(model, torch.ones(2, 4))[""].totals(by="step")
