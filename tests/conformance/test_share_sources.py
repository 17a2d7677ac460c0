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
from helpers.paired import Pair, train_both
from helpers.shares_only import DictionaryShares, shares_only
from helpers.small import batch, columns

GROUPINGS = [["label"], ["label", "task"]]


@pytest.fixture(scope="module")
def sgd_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A run of eight steps of SGD, float64."""
    return train_both(tmp_path_factory.mktemp("shares") / "run", 8)


@pytest.fixture(scope="module")
def adamw_memory(tmp_path_factory: pytest.TempPathFactory) -> Memory:
    """A run of six steps of AdamW, float64, in which one layer is called twice and a weight is tied."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.twice, self.last = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(5, 4, bias=False)
            self.last.weight = self.first.weight

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = self.twice(self.twice(torch.tanh(self.first(inputs)))).relu()
            return hidden + self.last(inputs)

    torch.manual_seed(0)
    model = Tied().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    path = tmp_path_factory.mktemp("adamw") / "run"
    with dualform.record(model, optimizer, path) as recorder:
        for step in range(6):
            inputs, labels = batch(step, dtype=torch.float64)
            if found := columns(step):
                recorder.annotate(**found)
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    return dualform.open(path)


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


def test_sums_that_are_not_there_are_refused(sgd_pair: Pair) -> None:
    source = sgd_pair.memory.share_source("label")
    with pytest.raises(SelectionError, match=r"no sums by \('task',\); there are by \('label',\)"):
        source.shares("0.weight", ("task",))
    with pytest.raises(SelectionError, match="no sums after step 40"):
        source.shares("0.weight", ("label",), horizon=40)


def test_a_run_without_shares_says_so(tmp_path: Path, sgd_pair: Pair) -> None:
    with pytest.raises(dualform.DualformError, match=r"keeps no shares. Record them: keep=dualform.Shares"):
        sgd_pair.memory._run.require_shares()
