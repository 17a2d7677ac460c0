"""Bags of tokens: sums, means, weights, padding, bags of different sizes, and what is not covered."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dualform
from dualform.errors import CoverageError
from dualform.recording.layers import find_kind
from helpers.loops import tolerances
from helpers.pairs import pairwise

OFFSETS = torch.tensor([0, 3, 3, 4])  # the second bag is empty
CASES: dict[str, tuple[dict[str, Any], bool, bool]] = {  # the module's options; with offsets; with weights
    "sum": ({"mode": "sum"}, False, False),
    "mean": ({"mode": "mean"}, False, False),
    "mean, padding": ({"mode": "mean", "padding_idx": 1}, False, False),
    "sum, weights": ({"mode": "sum"}, False, True),
    "sum, weights, padding": ({"mode": "sum", "padding_idx": -1}, False, True),
    "sum, offsets": ({"mode": "sum"}, True, False),
    "mean, offsets, padding": ({"mode": "mean", "padding_idx": 2}, True, False),
    "sum, offsets, weights": ({"mode": "sum"}, True, True),
    "mean, last offset": ({"mode": "mean", "include_last_offset": True}, True, False),
}


class Reader(nn.Module):
    """Reads bags of tokens, and weighs each token by a parameter where it has weights."""

    def __init__(self, options: dict[str, Any], *, offsets: bool, weights: bool) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(7, 4, **options)
        self.head = nn.Linear(4, 3)
        self.offsets = OFFSETS if offsets else None
        if offsets and options.get("include_last_offset"):
            self.offsets = torch.cat([OFFSETS, torch.tensor([12])])
        self.weights = weights

    def forward(self, tokens: Tensor) -> Tensor:
        """Take tokens (4, 3)."""
        tokens = tokens if self.offsets is None else tokens.flatten()
        weights = (tokens + 1.0).to(self.head.weight).sin() if self.weights else None
        result: Tensor = self.head(self.bags(tokens, self.offsets, per_sample_weights=weights).tanh())
        return result


@pytest.mark.parametrize(
    ("case", "optimizer", "dtype"), pairwise(CASES, ["SGD", "AdamW"], [torch.float32, torch.float64]), ids=str
)
def test_bags_are_recorded(run: Path, case: str, optimizer: str, dtype: torch.dtype) -> None:
    options, offsets, weights = CASES[case]
    torch.manual_seed(0)
    model = Reader(options, offsets=offsets, weights=weights).to(dtype)
    steps = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)
    with dualform.record(model, steps, run, strict=True) as recorder:
        for step in range(15):
            recorder.annotate(half=step % 2)
            steps.zero_grad()
            output = model(torch.randint(7, (4, 3)))
            (output * torch.linspace(-1, 1, output.numel()).to(output).reshape(output.shape)).sin().mean().backward()
            steps.step()
    memory = dualform.open(run)
    found = memory.verify(model)
    assert found.passed, found
    assert dtype == torch.float32 or all((layer.error or 0) <= 1e-11 for layer in found.layers), found
    tokens = torch.randint(7, (4, 3))
    spotlight = memory.attend(model, tokens)["bags"]
    rows = model.bags.weight.detach()[tokens.flatten()]
    close = tolerances(dtype)
    torch.testing.assert_close(spotlight.output().reshape(rows.shape), rows, **close)
    totals = spotlight.totals("half", of="contribution").values.sum(1) + spotlight.start()
    torch.testing.assert_close(totals, rows, **close)
    torch.testing.assert_close(spotlight.contributions().sum(1), totals - spotlight.start(), **close)
    kept, left_out = (view.shares()["bags.weight"] for view in (memory.where(half=0), memory.without(half=0)))
    torch.testing.assert_close(kept + left_out, memory.shares()["bags.weight"], **close)
    assert memory.patterns("bags").num_rows == 15 * 12


def test_bags_of_one_size_have_the_rows_of_the_batch(run: Path) -> None:
    torch.manual_seed(0)
    model = Reader({"mode": "mean"}, offsets=False, weights=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, run) as recorder:
        recorder.annotate(sample=torch.arange(4) + 10)
        model(torch.randint(7, (4, 3))).square().mean().backward()
        optimizer.step()
    found = dualform.open(run).patterns("bags").to_pydict()
    assert found["sample"] == [10 + i // 3 for i in range(12)]
    assert found["position"] == [i % 3 for i in range(12)]


def test_the_rows_of_bags_of_other_sizes_can_be_given(run: Path) -> None:
    torch.manual_seed(0)
    model = nn.EmbeddingBag(7, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.tensor([0] * 3 + [2] + [3] * 8)
    with dualform.record(model, optimizer, run) as recorder:
        recorder.annotate(sample=torch.arange(4) + 10, rows={"": rows})
        model(torch.randint(7, (12,)), OFFSETS).square().mean().backward()
        optimizer.step()
    assert dualform.open(run).patterns("").to_pydict()["sample"] == (rows + 10).tolist()


def test_a_tied_table_counts_both_uses(run: Path) -> None:
    """A table that is read in bags and is the output layer too."""
    torch.manual_seed(0)
    model = Reader({"mode": "mean"}, offsets=False, weights=False).double()
    model.head = nn.Linear(4, 7, bias=False).double()
    model.head.weight = model.bags.weight
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    with dualform.record(model, optimizer, run, strict=True):
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randint(7, (4, 3))).sin().mean().backward()
            optimizer.step()
    assert dualform.open(run).verify(model).passed


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"mode": "max"}, 'with mode="max"'),
        ({"sparse": True}, "with sparse=True"),
        ({"max_norm": 1.0}, "with max_norm"),
        ({"mode": "sum", "scale_grad_by_freq": True}, "with scale_grad_by_freq=True"),
    ],
    ids=str,
)
def test_options_that_are_not_covered_are_named(run: Path, options: dict[str, Any], named: str) -> None:
    model = Reader(options, offsets=False, weights=False)
    assert find_kind(model.bags) is None
    with pytest.raises(CoverageError, match=rf"'bags.weight' \(1 EmbeddingBag \({named}\)\)"):
        dualform.record(model, torch.optim.SGD(model.parameters(), lr=0.1), run, strict=True)
