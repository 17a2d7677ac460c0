"""A run from somebody else: what it names is not called, imported or obeyed unless the user trusts it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dualform
from dualform import cli
from dualform.errors import QueryError
from dualform.show.model_loading import load_model
from dualform.show.viewer.opened import Opened
from helpers.manifests import write_manifest
from helpers.small import recorded


@pytest.fixture
def foreign(run: Path) -> Path:
    """A run with tests, whose manifest the tests below forge."""
    recorded(run, 3)
    dualform.open(run).add_tests(torch.randn(4, 5), torch.tensor([0, 1, 2, 0]))
    return run


def forge(run: Path, factory: str, **arguments: Any) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    write_manifest(run, {**manifest, "factory": factory, "factory_arguments": arguments})


def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["dualform", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


COMMANDS = {"attend": [], "mask": ["--without", "step < 1"], "report": []}


@pytest.mark.parametrize("command", COMMANDS)
def test_what_a_manifest_names_is_not_called(
    foreign: Path, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forge(foreign, "subprocess:run", args=["touch", str(tmp_path / "PWNED")])
    monkeypatch.chdir(tmp_path)
    status, out, err = call(monkeypatch, capsys, command, foreign, *COMMANDS[command])
    assert (status, out) == (1, "")
    assert "subprocess:run(args=['touch'" in err
    assert "--trust" in err
    assert not (tmp_path / "PWNED").exists()


def test_the_viewer_does_not_call_it_either(foreign: Path, tmp_path: Path) -> None:
    forge(foreign, "subprocess:run", args=["touch", str(tmp_path / "PWNED")])
    with pytest.raises(QueryError, match="--trust"):
        Opened(foreign).session()
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize(
    ("factory", "arguments"),
    [
        ("os:system", {"command": "true"}),
        ("builtins:print", {}),
        ("dualform.experiments.models:torch", {}),
        ("dualform.experiments.models:nn", {}),
        ("torch.nn:functional", {}),
        ("collections:OrderedDict", {}),
    ],
)
def test_what_is_no_factory_of_its_module_is_refused_even_where_the_run_is_trusted(
    foreign: Path, factory: str, arguments: dict[str, Any]
) -> None:
    forge(foreign, factory, **arguments)
    with pytest.raises(QueryError, match=r"expected a function|cannot be imported"):
        load_model(dualform.open(foreign), None, trust=True)


def test_our_own_modules_that_are_no_models_need_trust(foreign: Path) -> None:
    """One of them would import and call what it is told."""
    forge(foreign, "dualform.show.model_loading:make_model", spec="subprocess:run")
    with pytest.raises(QueryError, match="--trust"):
        load_model(dualform.open(foreign), None)


def test_our_own_models_need_none(run: Path) -> None:
    from dualform.experiments.models import mlp

    model = mlp([5, 4, 3])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(
        model, optimizer, run, factory="dualform.experiments.models:mlp", factory_arguments={"widths": [5, 4, 3]}
    ):
        model(torch.randn(4, 5)).sum().backward()
        optimizer.step()
    loaded = load_model(dualform.open(run), None)
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(parameter, dict(model.named_parameters())[name])


def test_a_file_in_the_current_folder_is_not_imported_for_a_remembered_name(
    foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted.py").write_text("from torch import nn\ndef net():\n    return nn.Linear(5, 4)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    forge(foreign, "planted:net")
    with pytest.raises(QueryError, match=r"not looked for in the current folder: .*cannot be imported.*name a factory"):
        load_model(dualform.open(foreign), None, trust=True)
    assert "planted" not in sys.modules


def test_a_name_that_the_user_gives_is_looked_at_instead(foreign: Path, tmp_path: Path) -> None:
    forge(foreign, "subprocess:run", args=["touch", str(tmp_path / "PWNED")])
    loaded = load_model(dualform.open(foreign), "helpers.small:network")
    assert isinstance(loaded.model, nn.Sequential)
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize(
    ("answer", "agreed"), [("y\n", True), ("yes\n", True), ("\n", False), ("n\n", False), ("", False)]
)
def test_on_a_terminal_the_user_is_asked(
    foreign: Path, answer: str, agreed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal:
        def __init__(self, other: Any, line: str = "") -> None:
            self._other, self._line = other, line

        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            return self._line

        def __getattr__(self, name: str) -> Any:
            return getattr(self._other, name)

    forge(foreign, "helpers.small:network", seed=3)
    monkeypatch.setattr(sys, "stdin", Terminal(sys.stdin, answer))
    monkeypatch.setattr(sys, "stderr", Terminal(sys.stderr))
    if agreed:
        load_model(dualform.open(foreign), None)
    else:
        with pytest.raises(QueryError, match="--trust"):
            load_model(dualform.open(foreign), None)
    asked = capsys.readouterr().err
    assert "helpers.small:network(seed=3)" in asked
    assert "[y/N]" in asked


def test_control_characters_of_a_manifest_do_not_reach_the_terminal(
    foreign: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forge(foreign, "evil:run", text="\x1b]0;owned\x07")
    _, _, err = call(monkeypatch, capsys, "attend", foreign)
    assert "\x1b" not in err
    assert "\x07" not in err


def test_a_running_viewer_does_not_follow_a_changed_factory(foreign: Path, tmp_path: Path) -> None:
    forge(foreign, "helpers.small:network")
    opened = Opened(foreign, trust=True)
    first = opened.session()
    assert opened.session() is first
    forge(foreign, "subprocess:run", args=["touch", str(tmp_path / "PWNED")])
    with pytest.raises(QueryError, match="names another factory"):
        opened.session()
    assert not (tmp_path / "PWNED").exists()
    opened.close()


@pytest.mark.parametrize(
    "arguments", [{"widths": "xy"}, {}, {"widths": [5, 3], "depth": 2}, {"widths": [1 << 40, 1 << 40]}]
)
def test_arguments_that_our_own_factory_does_not_take_are_refused_by_name(
    foreign: Path, arguments: dict[str, Any]
) -> None:
    forge(foreign, "dualform.experiments.models:mlp", **arguments)
    with pytest.raises(QueryError, match=r"dualform\.experiments\.models:mlp\(.*\), which failed"):
        Opened(foreign).session()
