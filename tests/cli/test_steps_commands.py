"""Commands on a run that keeps steps: they replay its training, where the user says that it may be called."""

import json
import shutil
import sys
from pathlib import Path

import pytest

import dualform
from dualform import cli
from helpers.trainings import batch, train_mlp


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("steps") / "run"
    dualform.record_training(train_mlp, folder, factory="helpers.trainings:Mlp")
    dualform.open(folder).add_tests(*batch("mlp", 50))
    return folder


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("verify", []),
        ("attend", ["--by", "label"]),
        ("mask", ["--without", "label = 1"]),
        ("report", ["-o", "TMP/report.html"]),
        ("replay", ["--to", "TMP/new", "--layers", "3", "--keep", "patterns"]),
    ],
)
@pytest.mark.parametrize("allowed", [["--trust"], ["--train", "helpers.trainings:train_mlp"], []])
def test_a_command_replays_what_may_be_called(
    steps: Path,
    tmp_path: Path,
    command: str,
    options: list[str],
    allowed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.rmtree(steps / "cache", ignore_errors=True)  # or it would answer without a replay
    more = [option.replace("TMP", str(tmp_path)) for option in options]
    model = ["--model", "helpers.trainings:Mlp"] if command in ("attend", "mask", "report") else []
    monkeypatch.setattr(sys, "argv", ["dualform", command, str(steps), *more, *model, *allowed])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    err = capsys.readouterr().err
    if allowed:
        assert not stop.value.code, err
    else:
        assert stop.value.code == 1
        assert "helpers.trainings:train_mlp" in err
        assert "trust" in err
    if command == "replay" and allowed:
        assert dualform.open(tmp_path / "new").layers["3"].store == "keys+values"


def test_a_name_that_is_none_is_refused(
    steps: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for option, message in (("train_mlp", "expected package.module:function"), ("no.such:train", "cannot be imported")):
        monkeypatch.setattr(sys, "argv", ["dualform", "verify", str(steps), "--train", option])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert stop.value.code == 1
        assert message in capsys.readouterr().err


def test_info_says_what_a_run_keeps(
    steps: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["dualform", "info", str(steps), "--json"])
    with pytest.raises(SystemExit):
        cli.main()
    found = json.loads(capsys.readouterr().out)
    assert {layer["store"] for layer in found["layers"].values()} == {"steps"}
