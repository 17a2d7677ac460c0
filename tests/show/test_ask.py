"""What the command line asks: in eval mode, of the whole trained network, with every doubt in the answer itself."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import dualform
from dualform.show import cli

MODELS = """
import torch
from torch import nn

def drop():
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 4))
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the factories above, importable."""
    (tmp_path / "small_factories.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("small_factories", None)
    import small_factories  # type: ignore[import-not-found]

    return small_factories


def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    """Run the command line in this process; return (status, stdout, stderr)."""
    monkeypatch.setattr(sys, "argv", ["dualform", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


def learn(model: nn.Module, run: Path, *, factory: str, steps: int = 200, **options: Any) -> float:
    """Record a training on a task that can be learnt, keep 500 tests; return the accuracy on them in eval mode."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    truth = torch.randn(20, 4)
    with dualform.record(model, optimizer, run, factory=factory, **options) as recorder:
        for _ in range(steps):
            inputs = torch.randn(32, 20)
            labels = (inputs @ truth).argmax(1)
            recorder.annotate(label=labels)
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    inputs = torch.randn(500, 20)
    labels = (inputs @ truth).argmax(1)
    dualform.open(run).add_tests(inputs, labels)
    model.eval()
    with torch.no_grad():
        return float((model(inputs).argmax(1) == labels).double().mean())


def test_a_mask_that_removes_nothing_changes_no_prediction_of_a_model_with_dropout(
    run: Path, models: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    accuracy = learn(models.drop(), run, factory="small_factories:drop")
    status, out, _ = call(monkeypatch, capsys, "mask", run, "--without", "step < 0", "--json")
    found = json.loads(out)
    assert (status, found["changed"]) == (0, 0)
    assert found["accuracy_before"] == found["accuracy_after"] == pytest.approx(accuracy)
