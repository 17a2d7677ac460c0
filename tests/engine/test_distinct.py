"""Each distinct key once: the answers are those of every pattern's key, whatever is asked of which patterns."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dualform
from dualform.engine import distinct, local
from dualform.engine.distinct import DistinctKeys, distinct_ranges
from dualform.engine.jobs import Pass, WholeView
from dualform.engine.measures import PatternMeasure
from dualform.engine.reducers import FEW_GROUPS, GroupSums
from dualform.store.reader import Run
from helpers.pairs import pairwise

SAMPLES, EPOCHS, BATCH, D_IN = 50, 4, 10, 48

QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "attention": lambda layer: layer.attention(),
    "magnitudes": lambda layer: layer.totals(by="label", of="magnitude"),
    "magnitudes by step": lambda layer: layer.totals(by="step", of="magnitude"),
    "magnitudes by many": lambda layer: layer.totals(by=["sample", "step"], of="magnitude"),
    "totals": lambda layer: layer.totals(by="label"),
    "top": lambda layer: layer.top(5),
    "top by label": lambda layer: layer.top(3, by="label"),
    "top samples": lambda layer: layer.top(3, per="sample", of="magnitude"),
    "top contributions": lambda layer: layer.top(3, of="contribution", unit=1),
}
VIEWS: dict[str, Callable[[Any], Any]] = {
    "all": lambda memory: memory,
    "one label": lambda memory: memory.where(label=2),
    "without": lambda memory: memory.without(sample=list(range(0, SAMPLES, 3))),
    "early": lambda memory: memory.at(step=13),
    "the first epoch": lambda memory: memory.at(step=SAMPLES // BATCH),
    "none": lambda memory: memory.where(label=17),
}


EXPECTED: dict[tuple[Path, str, str], Any] = {}
"""Answers without anything of distinct keys, by run, question and view."""


@pytest.fixture(scope="module", params=[None, "float16"], ids=["float32", "float16"])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("distinct") / "run"
    inputs = torch.randn(SAMPLES, D_IN)
    model = nn.Sequential(nn.Linear(D_IN, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, folder, dtype=request.param, shard_bytes=5_000) as recorder:
        for _ in range(EPOCHS):
            for rows in torch.randperm(SAMPLES).split(BATCH):
                recorder.annotate(sample=rows, label=rows % 4)
                optimizer.zero_grad()
                model(inputs[rows]).square().mean().backward()
                optimizer.step()
    pools = [shard.entry.pools["0"] for shard in Run(folder).shards]
    assert sum(count > 0 for _, count in pools) > 1  # the pool lies in several shards
    return folder, model


@pytest.mark.mostly_slow(fast=18)
@pytest.mark.parametrize(
    ("recorded", "question", "view", "kept"),
    pairwise([None, "float16"], QUESTIONS, VIEWS, [True, False]),
    indirect=["recorded"],
)
def test_the_answers_are_the_same(
    recorded: tuple[Path, nn.Module], question: str, view: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = recorded
    inputs = torch.randn(7, D_IN, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr("dualform.engine.answer_cache.AnswerCache.find", lambda self, what: None)
    if not kept:
        monkeypatch.setattr(local, "MAX_REMEMBERED_MEASURES_BYTES", 0)

    def ask() -> Any:
        return QUESTIONS[question](VIEWS[view](dualform.open(folder)).attend(model, inputs, other_model=True)["0"])

    found = outcome(ask)
    if (folder, question, view) not in EXPECTED:
        monkeypatch.setattr(distinct, "WORTHWHILE_KEYS_PER_PATTERN", 0.0)
        EXPECTED[folder, question, view] = outcome(ask)
    expected = EXPECTED[folder, question, view]
    if isinstance(expected, str):
        assert found == expected
    else:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def outcome(ask: Callable[[], Any]) -> Tensor | str:
    """Return an answer's numbers, or what it failed with."""
    try:
        found = ask()
    except dualform.DualformError as error:
        return str(error)
    numbers: Tensor = found if isinstance(found, Tensor) else found.values
    return numbers


def test_keys_are_read_as_often_as_there_are_different_ones(
    recorded: tuple[Path, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = recorded
    read: list[int] = []

    def counted(*args: Any, **options: Any) -> Any:
        for piece in distinct_ranges(*args, **options):
            read.append(len(piece))
            yield piece

    monkeypatch.setattr(local, "distinct_ranges", counted)
    memory = dualform.open(folder)
    queries = torch.randn(7, D_IN)
    memory.attend(model, queries)["0"].attention()
    assert sum(read) == SAMPLES
    read.clear()
    memory.where(label=2).attend(model, queries)["0"].totals(by="step", of="magnitude")
    assert sum(read) == sum(number % 4 == 2 for number in range(SAMPLES))
    read.clear()
    memory.at(step=SAMPLES // BATCH).attend(model, queries, other_model=True)["0"].attention()  # all are different
    memory.attend(model, queries)["2"].attention()  # and here too
    assert read == []


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_several_threads_give_the_same(
    recorded: tuple[Path, nn.Module], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = recorded
    queries = torch.randn(9, D_IN)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        layer = dualform.open(folder).attend(model, queries, chunk_size=8)["0"]
        totals, attention = layer.totals(by="label", of="magnitude"), layer.attention()
    finally:
        torch.set_num_threads(before)
    monkeypatch.setattr(distinct, "WORTHWHILE_KEYS_PER_PATTERN", 0.0)
    plain = dualform.open(folder).attend(model, queries)["0"]
    torch.testing.assert_close(attention, plain.attention(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(totals.values, plain.totals(by="label", of="magnitude").values, rtol=1e-5, atol=1e-5)


def test_patterns_are_counted_by_key_and_group() -> None:
    found = DistinctKeys(np.array([4, 7, 9]), np.array([0, 2, 2, 1, 0])).counts(
        torch.tensor([1, 0, 0, 1, 1]), 2, torch.float64
    )
    assert found.tolist() == [[0, 0, 2], [2, 1, 0]]


def test_counts_are_made_for_few_groups_only(recorded: tuple[Path, nn.Module]) -> None:
    """They take memory for every key and group."""
    source, queries = Run(recorded[0]), torch.randn(3, D_IN)
    executor = local.LocalExecutor()

    def usable(groups: int) -> bool:
        reducer = GroupSums(groups)
        job = Pass("0", WholeView(source, source.steps), reducer, queries, queries, PatternMeasure("magnitude"))
        return executor._usable_distinct(source, [job]) is not None

    assert usable(FEW_GROUPS)
    assert not usable(FEW_GROUPS + 1)
