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
from dualform.show.viewer.routes.badge import rebuild_badge
from dualform.show.viewer.session import Session

MODELS = """
import torch
from torch import nn

class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(20, 64)
        self.scale = nn.Parameter(torch.randn(64))
        self.last = nn.Linear(64, 4)

    def forward(self, x):
        return self.last((self.first(x) * self.scale).relu())

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


@pytest.mark.filterwarnings("ignore:.*are not recorded:UserWarning")
def test_verify_names_what_is_not_recorded_in_text_json_and_report(
    run: Path, models: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    learn(models.Half(), run, factory="small_factories:Half", steps=20, layers=["last"])
    status, out, _ = call(monkeypatch, capsys, "verify", run)
    words = "3 parameters, 84.4 % of the trained elements: scale, first.weight, first.bias"
    assert status == 0
    assert f"not recorded: {words}" in out
    assert "passed for what is recorded (15.6 % of the trained elements)" in out
    status, out, _ = call(monkeypatch, capsys, "verify", run, "--json")
    found = json.loads(out)
    assert found["uncovered"] == {"first.weight": 1280, "first.bias": 64, "scale": 64}
    assert found["uncovered_share"] == pytest.approx(1408 / 1668)
    assert found["verdict"].startswith("passed for what is recorded")
    status, _, _ = call(monkeypatch, capsys, "report", run, "-o", tmp_path / "r.html", "-t", 0)
    page = (tmp_path / "r.html").read_text()
    assert words in page
    assert "passed for what is recorded (15.6 %" in page
    assert "is rounding" in page
    session = Session(dualform.open(run), models.Half(), budget=1 << 20)
    badge = rebuild_badge(session, ("label",), wait=True)
    assert (badge["state"], badge["uncovered"]) == ("passed", found["uncovered"])
    assert words in badge["not_recorded"]
    assert all(row["relative_error"] <= row["bound"] for row in badge["layers"])
