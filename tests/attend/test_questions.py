"""Several questions at once: the same answers, and every pattern is read once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dualform
from dualform.engine import local
from dualform.errors import QueryError
from dualform.store.stored_rows import FileRows

SAMPLES, STEPS, BATCH = 40, 12, 20


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[Path, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", shard_bytes=2000) as recorder:
        for step in range(STEPS):
            rows = torch.arange(BATCH) + BATCH * (step % 2)
            recorder.annotate(sample=rows, label=rows % 3)
            optimizer.zero_grad()
            model(torch.randn(BATCH, 6)).square().mean().backward()
            optimizer.step()
    return tmp_path / "run", model


class Reading:
    """Counts the rows of keys and values that are read from files."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.rows = 0
        real = FileRows.take

        def take(rows: FileRows, index: Any, into: Any = None) -> Any:
            found = real(rows, index, into)
            self.rows += len(found[0])
            return found

        patch.setattr(FileRows, "take", take)


QUESTIONS = (
    dualform.Totals(by="label"),
    dualform.Totals(by="label", of="magnitude"),
    dualform.Top(5),
    dualform.Top(2, by="label", largest=False),
    dualform.Top(3, per="sample"),
)


@pytest.mark.parametrize("remember", [True, False], ids=["remembered", "not remembered"])
def test_several_questions_take_one_reading(
    recorded: tuple[Path, nn.Module], remember: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = recorded
    if not remember:
        monkeypatch.setattr(local, "MAX_REMEMBERED_MEASURES_BYTES", 0)
    inputs = torch.randn(4, 6)
    apart = dualform.open(path).attend(model, inputs)
    expected = [[layer.compute(question)[0] for layer in apart.layers.values()] for question in QUESTIONS]
    (path / "cache").rename(path.parent / "cache-of-before")  # the sums by label would be found there

    memory = dualform.open(path)
    spotlight = memory.attend(model, inputs)
    reading = Reading(monkeypatch)
    found = spotlight.compute(*QUESTIONS)
    assert reading.rows == 2 * STEPS * BATCH, "the keys of each pattern of two layers, once"
    for answers, before in zip(found, expected, strict=True):
        assert list(answers) == ["0", "2"]
        for answer, other in zip(answers.values(), before, strict=True):
            torch.testing.assert_close(answer.values, other.values, rtol=1e-6, atol=1e-6)


def test_contributions_share_a_reading_too(recorded: tuple[Path, nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of values too."""
    path, model = recorded
    layer = dualform.open(path).attend(model, torch.randn(40, 6))["2"]
    reading = Reading(monkeypatch)
    totals, best = layer.compute(dualform.Totals("label", "contribution"), dualform.Top(3, of="contribution", unit=1))
    assert reading.rows == 2 * STEPS * BATCH, "keys and values, once"
    torch.testing.assert_close(totals.values, layer.totals("label", of="contribution").values)
    torch.testing.assert_close(best.values, layer.top(3, of="contribution", unit=1).values)


def test_what_is_no_question(recorded: tuple[Path, nn.Module]) -> None:
    path, model = recorded
    with pytest.raises(QueryError, match="is no question"):
        dualform.open(path).attend(model, torch.randn(1, 6)).compute("label")  # type: ignore[arg-type]
