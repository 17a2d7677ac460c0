"""Answers: what they hold, and what they look up only when it is asked for."""

from pathlib import Path

import pytest
import torch
from torch import nn

import dualform
from dualform.attend.answers import Columns
from dualform.attend.groups import Table


def test_columns_are_looked_up_once_and_only_when_one_is_asked_for() -> None:
    asked = []

    def find() -> dict[str, list[int]]:
        asked.append(1)
        return {"label": [3, 4], "step": [0, 1]}

    columns = Columns(["label", "step"], find)
    assert list(columns) == ["label", "step"]
    assert len(columns) == 2
    assert "label" in columns
    with pytest.raises(KeyError):
        columns["sample"]
    assert columns == {"label": [3, 4], "step": [0, 1]}
    assert repr(columns) == "{'label': [3, 4], 'step': [0, 1]}"
    assert asked == [1]


def test_a_ranking_looks_nothing_up_until_somebody_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        recorder.annotate(label=torch.arange(8) % 3)
        model(torch.randn(8, 5)).square().mean().backward()
        optimizer.step()
    looked: list[str] = []
    real = Table.lookup

    def lookup(self: Table, layer: str, *arguments: object) -> object:
        looked.append(layer)
        return real(self, layer, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Table, "lookup", lookup)
    top = dualform.open(tmp_path / "run").attend(model, torch.randn(1, 5))[""].top(3)
    patterns = top.patterns.reshape(-1).tolist()
    top.patterns.zero_()  # whatever somebody does with the answer
    assert looked == []
    assert top.columns["label"] == [number % 3 for number in patterns]
    assert top.to_arrow()["label"].to_pylist() == top.columns["label"]
    assert looked == [""]
