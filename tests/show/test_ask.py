"""What the command line asks: in eval mode, of the whole trained network, with every doubt in the answer itself."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import dualform
from dualform import cli
from dualform.attend.removal import Removal
from dualform.attend.text_answers import TextSpotlight
from dualform.errors import QueryError
from dualform.show.model_loading import Loaded, make_model
from dualform.show.panels.badge import rebuild_badge
from dualform.show.panels.masking import mask_effect
from dualform.show.panels.overview import run_overview
from dualform.show.prompt_answers import answer_prompt
from dualform.show.report.write import write_report
from dualform.show.session import Mask, Session
from dualform.show.viewer.opened import Opened
from dualform.store import kept_state

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

class Normed(nn.Module):
    # Batch normalisation, a trained parameter of its own, and a frozen part that the seed decides.
    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Parameter(torch.randn(20, 64, generator=generator), requires_grad=False)
        self.norm = nn.BatchNorm1d(64, momentum=0.3)
        self.scale = nn.Parameter(torch.randn(64))
        self.last = nn.Linear(64, 4)

    def forward(self, x):
        return self.last((self.norm(x @ self.first) * self.scale).relu())

def other():
    return Normed(seed=9)

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
    """Run the command line in this process, trusting our own runs; return (status, stdout, stderr)."""
    trust = ["--trust"] if arguments[0] in ("attend", "mask", "report") else []
    monkeypatch.setattr(sys, "argv", ["dualform", *map(str, arguments), *trust])
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
    assert (badge.state, badge.uncovered) == ("passed", found["uncovered"])
    assert words in badge.not_recorded
    for row in badge.layers:
        assert row.relative_error is not None
        assert row.bound is not None
        assert row.relative_error <= row.bound


@pytest.fixture
def normed(run: Path, models: Any, monkeypatch: pytest.MonkeyPatch) -> float:
    """A run of `Normed` that keeps a checksum of its frozen part only; returns the accuracy of the trained network."""
    monkeypatch.setattr(kept_state, "FROZEN_BYTES", 10)
    torch.manual_seed(0)
    return learn(models.Normed(), run, factory="small_factories:Normed")


NOT_RECORDED = pytest.mark.filterwarnings("ignore:.*are not recorded:UserWarning")


@NOT_RECORDED
def test_mask_and_report_are_about_the_trained_network(
    run: Path, normed: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, out, err = call(monkeypatch, capsys, "mask", run, "--without", "step < 0", "--json")
    found = json.loads(out)
    assert (status, err) == (0, "")
    assert normed > 0.6
    assert found["accuracy_before"] == pytest.approx(normed)
    assert found["warnings"] == []
    status, out, err = call(monkeypatch, capsys, "report", run, "-o", tmp_path / "r.html", "-t", 0)
    assert (status, err) == (0, "")
    page = (tmp_path / "r.html").read_text()
    assert f"{100 * normed:.2f} % of 500 tests" in page
    assert "WARNING" not in page


@NOT_RECORDED
@pytest.mark.parametrize("command", ["attend", "mask", "report"])
def test_a_factory_with_another_frozen_part_is_refused(
    run: Path, normed: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.chdir(run.parent)
    more = {"attend": [], "mask": ["--without", "step < 9"], "report": []}[command]
    status, out, err = call(monkeypatch, capsys, command, run, *more, "--model", "small_factories:other")
    assert (status, out) == (1, "")
    assert "'first' differs from the checksum that the run keeps" in err
    assert "--accept-untrained" in err


@NOT_RECORDED
def test_an_accepted_doubt_is_in_the_output_itself(
    run: Path, normed: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    accept = ("--model", "small_factories:other", "--accept-untrained")
    words = "WARNING: The run does not know 1 part of the trained model: 'first' differs"
    for more in ((), ("--json",)):
        status, out, _ = call(monkeypatch, capsys, "attend", run, *accept, *more)
        assert status == 0
        assert words in " ".join(out.split())
        status, out, _ = call(monkeypatch, capsys, "mask", run, "--without", "step < 9", *accept, *more)
        assert status == 0
        assert words in " ".join(out.split())
        status, out, _ = call(monkeypatch, capsys, "report", run, "-o", tmp_path / "r.html", "-t", 0, *accept, *more)
        assert status == 0
        assert words in " ".join(out.split())
    status, out, _ = call(monkeypatch, capsys, "attend", run, *accept, "--json")
    assert all(words in answer["note"] for answer in json.loads(out))
    page = (tmp_path / "r.html").read_text()
    shown = words.replace("'", "&#39;")
    assert page.count(shown) == 2, "at the top, and in the summary"
    assert f'<p class="warning" role="note">{shown}' in page
    opened = Opened(run, model="small_factories:other", accept_untrained=True)
    assert words in run_overview(opened.session()).warnings[0]
    with pytest.raises(QueryError, match="'first' differs"):
        Opened(run, model="small_factories:other").session()


def mock_memory(answer: TextSpotlight) -> Any:
    """A memory that gives this answer to every question about a text."""
    memory = SimpleNamespace(step=5, attend_text=lambda *_, **__: answer, unknown_text=lambda *_: "3 patterns unknown")
    memory.info = lambda: SimpleNamespace(steps=9)
    memory.unwarned = lambda: memory
    return memory


def test_a_warning_stands_in_a_text_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = Loaded(nn.Linear(2, 2), ("WARNING: another network.",))
    monkeypatch.setattr("dualform.show.prompt_answers.load_model", lambda *_, **__: loaded)
    answer = TextSpotlight("the", ("a note",), (), "fox", "words", {})
    found = answer_prompt(mock_memory(answer), "the", model=None, accept_untrained=True)
    late = "The queries are those of the model at the end, after step 9."
    assert found.notes == ("WARNING: another network.", "3 patterns unknown", late, "a note")


@pytest.fixture
def partly(run: Path, models: Any) -> Path:
    """A run of which every second step has no labels."""
    torch.manual_seed(0)
    model = models.drop()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, run, factory="small_factories:drop") as recorder:
        for step in range(6):
            inputs = torch.randn(8, 20)
            labels = inputs[:, :4].argmax(1)
            if step % 2:
                recorder.annotate(label=labels)
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    dualform.open(run).add_tests(torch.randn(9, 20), torch.zeros(9, dtype=torch.int64))
    return run


def test_a_mask_says_what_it_cannot_decide(
    partly: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "48 patterns have no value in the mask's columns (24 in layer '0', 24 in layer '3')"
    status, out, err = call(monkeypatch, capsys, "mask", partly, "--without", "label = 3", "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["unknown"] == {"0": 24, "3": 24}
    status, out, err = call(monkeypatch, capsys, "mask", partly, "--without", "label = 3")
    assert (status, err) == (0, "")
    assert words in " ".join(out.split())
    status, out, err = call(monkeypatch, capsys, "mask", partly, "--without", "step = 3")
    assert "no value" not in out
    status, out, err = call(monkeypatch, capsys, "attend", partly, "--without", "label = 3", "--json")
    assert (status, err) == (0, "")
    assert all("24 patterns have no value" in answer["note"] for answer in json.loads(out))
    session = Session(dualform.open(partly), dualform.open(partly).trained(network(partly)), budget=1 << 20)
    effect = mask_effect(session, Mask(Removal(by=("label",), groups=(3,))))
    assert effect.unknown == {"0": 24, "3": 24}
    assert words in effect.undecided
    effect = mask_effect(session, Mask(Removal(by=("label",), groups=(3,)), layers=("3",)))
    assert effect.unknown == {"3": 24}
    effect = mask_effect(session, Mask(Removal(by=("label",), steps=((0, 3),))))
    assert (effect.unknown, effect.undecided) == ({}, "")


def network(run: Path) -> nn.Module:
    """Make the model that a run remembers."""
    spec = dualform.open(run).factory
    assert spec is not None
    return make_model(spec[0])


def test_an_answer_says_that_its_queries_are_those_of_the_end(
    partly: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = call(monkeypatch, capsys, "attend", partly, "--at", 2, "--json")
    assert (status, err) == (0, "")
    assert all("model at the end, after step 6" in answer["note"] for answer in json.loads(out))
    status, out, _ = call(monkeypatch, capsys, "attend", partly, "--json")
    assert all(answer["note"] == "" for answer in json.loads(out))


def test_a_report_of_another_model_says_so(partly: Path, tmp_path: Path) -> None:
    memory = dualform.open(partly)
    outcome = write_report(memory, tmp_path / "r.html", tests=[0], model=network(partly))
    assert "not the recorded one after step 6" in outcome.warnings[0]
    assert "not the recorded one after step 6" in (tmp_path / "r.html").read_text()
    outcome = write_report(memory, tmp_path / "r.html", tests=[0], model=memory.trained(network(partly)))
    assert outcome.warnings == ()
