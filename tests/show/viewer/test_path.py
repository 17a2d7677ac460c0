"""Where an answer comes from, in the viewer, the report and on the command line: the library's path contributions."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import torch
from typer.testing import CliRunner

import dualform
from dualform import cli
from dualform.attend.path import PATH_NOTE
from dualform.show.panels.path_account import (
    SHARED_REFERENCES,
    PairedContrast,
    PathAccount,
    PathUnits,
    account_tests,
    bins_of_steps,
    reference_inputs,
    usual_units,
)
from dualform.show.report.write import write_report
from dualform.show.session import Session
from helpers.served import Running
from helpers.small_models import record_pictures, small_classifier

FACTORY = "helpers.small_models:small_classifier"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A run of six steps, with thirteen groups, tests and targets; and its model."""
    folder = tmp_path_factory.mktemp("path") / "run"
    torch.manual_seed(0)
    model = small_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    inputs = torch.randn(26, 4)
    with dualform.record(model, optimizer, folder) as recorder:
        recorder.tests(inputs[:5], torch.tensor([0, 1, 2, 0, 1]))
        recorder.media(labels=["cat", "dog", "cow"])
        for step in range(6):
            rows = torch.arange(13) + 13 * (step % 2)
            recorder.annotate(sample=rows, label=rows % 3, source=rows % 13)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs[rows]), rows % 3).backward()
            optimizer.step()
    memory = dualform.open(folder)
    return SimpleNamespace(folder=folder, model=model, memory=memory, session=Session(memory, model, budget=1 << 20))


@pytest.fixture(scope="module")
def asked(small: SimpleNamespace) -> Iterator[httpx.Client]:
    server = Running(small.folder, model=FACTORY)
    with server.client() as found:
        yield found
    server.stop()


def test_the_account_is_the_librarys(asked: httpx.Client, small: SimpleNamespace) -> None:
    question: dict[str, str | int] = {"test": 2, "by": "label", "references": 2}
    first = asked.get("/api/path", params=question).json()
    assert first["account"] is None
    assert (first["inputs"], first["steps"], first["note"]) == (3, 6, PATH_NOTE)
    account = asked.get("/api/path", params={**question, "start_path": 1}).json()["account"]
    tests = small.session.tests
    outputs = small.model(tests[2:3])[0].detach()
    units = usual_units(outputs, 2)
    assert units.instead is not None
    assert (account["said"], account["instead"]) == (units.said, units.instead)
    spotlight = small.memory.attend(small.model, tests[2:3], quantity=dualform.contrast(units.said, units.instead))
    wanted = spotlight.path_contributions(by="label", against=tests[[0, 3]], over=dualform.bins("step", width=1))
    bars = {bar["group"]: bar["value"] for bar in account["bars"] if bar["kind"] == "group"}
    assert [bars[group] for group in wanted.groups] == pytest.approx(wanted.values[0].tolist(), rel=1e-5)
    assert wanted.by_step is not None
    assert account["together"] == pytest.approx(wanted.by_step[0].sum(0).tolist(), rel=1e-5)
    assert sum(bar["value"] for bar in account["bars"]) == pytest.approx(account["output"], abs=1e-5)
    assert account["output"] == pytest.approx(float(outputs[units.said] - outputs[units.instead]), rel=1e-5)
    mean = small.model(tests[[0, 3]]).detach()[:, [units.instead, units.said]].diff(dim=1).mean()
    assert account["bars"][0]["kind"] == "reference"
    assert account["bars"][0]["value"] == pytest.approx(float(mean), rel=1e-4, abs=1e-6)
    assert asked.get("/api/path", params=question).json()["account"] == account, "it is kept with the run"


def test_what_is_asked_by_default() -> None:
    outputs = torch.tensor([1.0, 3.0, 2.0])
    assert usual_units(outputs, 0) == PathUnits(1, 0), "said rather than the target"
    assert usual_units(outputs, 1) == PathUnits(1, 2), "where it is right, rather than the second"
    assert usual_units(outputs, None) == PathUnits(1, 2)
    assert usual_units(outputs[:1], None) == PathUnits(0, None)


def test_questions_that_make_no_sense_are_refused(asked: httpx.Client, small: SimpleNamespace) -> None:
    said = int(small.model(small.session.tests[1:2]).argmax())
    for than, message in ((str(said), "compared with itself"), ("3", "number from 0 to 2"), ("x", "whole number")):
        answer = asked.get("/api/path", params={"test": 1, "by": "label", "than": than})
        assert answer.status_code == 400, than
        assert message in answer.json()["error"]


def test_tests_with_contrasts_of_their_own_share_one_path(small: SimpleNamespace) -> None:
    accounts = account_tests(small.session, [0, 1, 2], ("source",))
    assert len({(one.said, one.instead) for one in accounts.values() if isinstance(one, PathAccount)}) > 1
    for test, account in accounts.items():
        assert isinstance(account, PathAccount)
        assert account.instead is not None
        spotlight = small.memory.attend(
            small.model,
            small.session.tests[test : test + 1],
            quantity=dualform.contrast(account.said, account.instead),
        )
        against = reference_inputs(small.session, None, SHARED_REFERENCES)
        wanted = spotlight.path_contributions(by="source", against=against, over=bins_of_steps(small.session))
        bars = {bar.group: bar.value for bar in account.bars if bar.kind == "group"}
        values = dict(zip(wanted.groups, wanted.values[0].tolist(), strict=True))
        assert bars == pytest.approx({group: values[group] for group in bars}, rel=0.05, abs=1e-3)
        (others,) = (bar for bar in account.bars if bar.kind == "others")
        assert others.name == "1 other group"
        assert sum(bar.value for bar in account.bars) == pytest.approx(account.output, abs=1e-5)
        assert account.question == f"{account.said_name} rather than {account.instead_name}"


def test_a_paired_contrast_is_each_inputs_own() -> None:
    outputs = torch.tensor([[[9.0, 9.0, 9.0], [1.0, 3.0, 7.0]], [[9.0, 9.0, 9.0], [2.0, 4.0, 8.0]]])
    targets = torch.tensor([2 * 3 + 0, 1 * 3 + 2])
    assert PairedContrast(3)(outputs, targets).tolist() == [6.0, -4.0], "at the last position"
    assert PairedContrast(3)(outputs[:, 1], targets).tolist() == [6.0, -4.0]


def attend(folder: Path, *options: str) -> tuple[int, str]:
    found = CliRunner().invoke(cli.app, ["attend", str(folder), "--of", "path", *options])
    return found.exit_code, found.output + ("" if found.exception is None else str(found.exception))


def test_the_command_prints_the_librarys_parts(small: SimpleNamespace) -> None:
    model = ["--model", FACTORY]
    code, text = attend(
        small.folder,
        "--contrast",
        "2,0",
        "--by",
        "label",
        "--against",
        "3",
        "--over",
        "step:3",
        "-t",
        "4",
        *model,
        "--json",
    )
    assert code == 0, text
    (answer,) = json.loads(text)
    spotlight = small.memory.attend(small.model, small.session.tests[4:5], quantity=dualform.contrast(2, 0))
    wanted = spotlight.path_contributions(
        by="label", against=small.session.tests[:3], over=dualform.bins("step", width=3)
    )
    groups = {row["label"]: row["adds"] for row in answer["parts"] if row["part"] == "group"}
    assert groups == pytest.approx(dict(zip(wanted.groups, wanted.values[0].tolist(), strict=True)))
    assert sum(row["adds"] for row in answer["parts"]) == pytest.approx(answer["output"])
    assert answer["references"] == 3
    assert len(answer["over_steps"]) == 6
    assert PATH_NOTE in answer["note"]
    code, text = attend(small.folder, "--by", "label", *model)
    assert code == 0, text
    assert "rather than" in text
    assert "account of this training" in " ".join(text.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--contrast", "9"], "expected two different outputs"),
        (["--contrast", "2,2"], "expected two different outputs"),
        (["--contrast", "2,9"], "names a class that the model does not have"),
        (["--contrast", "2,0", "--quantity", "logit"], "Ask about one of them"),
        (["--over", "label"], "expected bins of steps"),
        (["--against", "99"], "there are 5 inputs"),
        (["--layer", "0"], "leave --layer and --top out"),
        (["-t", "7"], "There is no input 7"),
        (["--of", "attention", "--contrast", "2,0"], "add --of path"),
    ],
)
def test_options_that_make_no_sense_are_refused(small: SimpleNamespace, options: list[str], message: str) -> None:
    code, text = attend(small.folder, *options, "--model", FACTORY)
    assert code != 0
    assert message in text


def test_the_report_has_a_section(small: SimpleNamespace, tmp_path: Path) -> None:
    write_report(small.memory, tmp_path / "with.html", tests=[0, 1], by=("label",), model=small.model)
    page = (tmp_path / "with.html").read_text(encoding="utf-8")
    account = account_tests(small.session, [0, 1], ("label",))[1]
    assert isinstance(account, PathAccount)
    assert page.count("Where the answer comes from") == 2
    assert f"<strong>{account.question}</strong>" in page
    assert page.count(PATH_NOTE) >= 2
    write_report(
        small.memory, tmp_path / "without.html", tests=[0], by=("label",), model=small.model, path_contributions=False
    )
    assert "Where the answer comes from" not in (tmp_path / "without.html").read_text(encoding="utf-8")


def test_the_report_says_why_there_is_no_path(tmp_path: Path) -> None:
    model = record_pictures(tmp_path / "run", layers={"*": "keys"})
    write_report(dualform.open(tmp_path / "run"), tmp_path / "report.html", tests=[0], model=model)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Where the answer comes from" in page
    assert "keys only" in page
