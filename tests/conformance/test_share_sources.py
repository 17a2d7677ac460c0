"""The sums of a view of patterns, and those that a test keeps in dictionaries, are what every `ShareSource` must be."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import dualform
from conformance.share_sources import ShareSourceConformance
from dualform.attend.memory import Memory
from dualform.engine.share_source import ShareSource
from dualform.errors import SelectionError
from dualform.recording.keep import Shares
from helpers.paired import Pair, train_both
from helpers.shares_only import DictionaryShares, shares_only
from helpers.small import batch, columns

GROUPINGS = [["label"], ["label", "task"]]


@pytest.fixture(scope="module")
def sgd_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A run of eight steps of SGD, float64."""
    return train_both(tmp_path_factory.mktemp("shares") / "run", 8)


class Tied(nn.Module):
    """A network in which one layer is called twice and a weight is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(5, 4, bias=False)
        self.last.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.twice(self.twice(torch.tanh(self.first(inputs)))).relu()
        return hidden + self.last(inputs)


def recorded_tied(path: Path, keep: Shares | None = None) -> Memory:
    """Record six steps of AdamW, float64; a step in three has no columns."""
    torch.manual_seed(0)
    model = Tied().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    with dualform.record(model, optimizer, path, keep=keep) as recorder:
        for step in range(6):
            inputs, labels = batch(step, dtype=torch.float64)
            if found := columns(step):
                recorder.annotate(**found)
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    return dualform.open(path)


@pytest.fixture(scope="module")
def adamw_memory(tmp_path_factory: pytest.TempPathFactory) -> Memory:
    """The patterns of six steps of AdamW."""
    return recorded_tied(tmp_path_factory.mktemp("adamw") / "run")


class TestViewOfPatterns(ShareSourceConformance):
    """A stored-patterns memory of SGD makes its shares by passes."""

    @pytest.fixture
    def patterns(self, sgd_pair: Pair) -> Memory:
        return sgd_pair.memory

    @pytest.fixture
    def shares(self, patterns: Memory) -> ShareSource:
        return patterns.share_source(*GROUPINGS)


class TestFoldedPatterns(TestViewOfPatterns):
    """A stored-patterns memory of AdamW makes its shares by folds."""

    @pytest.fixture
    def patterns(self, adamw_memory: Memory) -> Memory:
        return adamw_memory


class TestDictionary(TestViewOfPatterns):
    """Shares that a test keeps."""

    @pytest.fixture
    def shares(self, patterns: Memory) -> ShareSource:
        return DictionaryShares(patterns, GROUPINGS, [4, patterns.step])


class TestViewOfShares(TestViewOfPatterns):
    """A memory that keeps shares makes coarser ones of them."""

    @pytest.fixture
    def shares(self, patterns: Memory) -> ShareSource:
        return shares_only(patterns, ["task", "label"], at=[4]).share_source(*GROUPINGS)


@pytest.fixture(scope="module")
def recorded_shares(tmp_path_factory: pytest.TempPathFactory) -> Memory:
    """The shares of six steps of AdamW, recorded."""
    return recorded_tied(tmp_path_factory.mktemp("recorded") / "run", Shares(by=GROUPINGS, at=[4]))


@pytest.fixture(scope="module")
def shares_for_reading(tmp_path_factory: pytest.TempPathFactory) -> Memory:
    """The same of a run that cannot go on."""
    keep = Shares(by=GROUPINGS, at=[4], resumable=False)
    return recorded_tied(tmp_path_factory.mktemp("reading") / "run", keep)


class TestRecorded(TestFoldedPatterns):
    """Shares that were recorded while the network trained."""

    @pytest.fixture
    def shares(self, recorded_shares: Memory) -> ShareSource:
        return recorded_shares._run.require_shares()


class TestRecordedForReading(TestFoldedPatterns):
    """Recorded shares of a run that cannot go on, which leaves rounding out at the end."""

    @pytest.fixture
    def shares(self, shares_for_reading: Memory) -> ShareSource:
        return shares_for_reading._run.require_shares()


def test_what_is_left_out_of_a_run_that_cannot_go_on(recorded_shares: Memory, shares_for_reading: Memory) -> None:
    assert 0 < shares_for_reading.info().bytes < recorded_shares.info().bytes
    assert not list(shares_for_reading.path.rglob("state-*"))
    for step in (4, 6):
        mine, whole = (memory.at(step=step).shares(by="label") for memory in (shares_for_reading, recorded_shares))
        for name, found in mine.items():
            torch.testing.assert_close(found.rounding, whole[name].rounding, rtol=1e-6, atol=1e-15)
    assert shares_for_reading.verify().passed
    assert recorded_shares.verify().passed


def test_sums_that_are_not_there_are_refused(sgd_pair: Pair) -> None:
    source = sgd_pair.memory.share_source("label")
    with pytest.raises(SelectionError, match=r"no sums by \('task',\); there are by \('label',\)"):
        source.shares("0.weight", ("task",))
    with pytest.raises(SelectionError, match="no sums after step 40"):
        source.shares("0.weight", ("label",), horizon=40)


def test_a_run_without_shares_says_so(tmp_path: Path, sgd_pair: Pair) -> None:
    with pytest.raises(dualform.DualformError, match=r"keeps no shares. Record them: keep=dualform.Shares"):
        sgd_pair.memory._run.require_shares()
