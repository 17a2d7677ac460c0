"""Answers: what they hold, and what they look up only when it is asked for."""

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dualform
from dualform.attend.answers import LookedUpColumns
from dualform.attend.groups import Table


def test_columns_are_looked_up_once_and_only_when_one_is_asked_for() -> None:
    asked = []

    def find() -> dict[str, list[int]]:
        asked.append(1)
        return {"label": [3, 4], "step": [0, 1]}

    columns = LookedUpColumns(["label", "step"], find)
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
    copied = pickle.loads(pickle.dumps(top))
    assert copied.columns == top.columns
    assert isinstance(copied.columns, dict)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_autocast_around_a_question_changes_nothing(tmp_path: Path, kind: Any) -> None:
    """Neither the answer nor what is kept for later ones."""
    torch.manual_seed(0)
    model = nn.Linear(37, 5)
    optimizer = kind(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for _ in range(4):
            recorder.annotate(label=torch.arange(32) % 3)
            optimizer.zero_grad()
            model(torch.randn(32, 37)).square().mean().backward()
            optimizer.step()
    inputs = torch.randn(6, 37)
    questions: list[Callable[[Any], Tensor]] = [
        lambda layer: layer.attention(),
        lambda layer: layer.totals("label").values,
        lambda layer: layer.totals("label", of="magnitude").values,
        lambda layer: layer.totals("label", of="contribution").values,
        lambda layer: layer.output(),
        lambda layer: layer.contributions(),
        lambda layer: layer.top(3, of="contribution", unit=1).values,
    ]
    expected = [question(dualform.open(tmp_path / "run").attend(model, inputs)[""]) for question in questions]
    shutil.rmtree(tmp_path / "run" / "cache", ignore_errors=True)
    layer = dualform.open(tmp_path / "run").attend(model, inputs)[""]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = [question(layer) for question in questions]
        weights = dualform.open(tmp_path / "run").weights()
    later = [question(dualform.open(tmp_path / "run").attend(model, inputs)[""]) for question in questions]
    for one, two, three in zip(expected, under, later, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(three, one, rtol=1e-6, atol=1e-7)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-5, atol=1e-6)
