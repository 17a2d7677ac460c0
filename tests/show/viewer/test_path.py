"""Where an answer comes from, in the viewer, the report and on the command line: the library's path contributions."""

from types import SimpleNamespace

import httpx
import pytest
import torch

import dualform
from dualform.attend.path import PATH_NOTE
from dualform.show.panels.path_account import (
    PairedContrast,
    PathAccount,
    PathUnits,
    account_tests,
    reference_inputs,
    step_bins,
    usual_units,
)
from dualform.show.session import Session


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A run of six steps, with thirteen groups, tests and targets; and its model."""
    folder = tmp_path_factory.mktemp("path") / "run"
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
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


def test_the_account_is_the_librarys(client: httpx.Client, digits: SimpleNamespace, memory: dualform.Memory) -> None:
    asked: dict[str, str | int] = {"test": 5, "by": "label", "references": 2}
    first = client.get("/api/path", params=asked).json()
    assert first["account"] is None
    assert (first["inputs"], first["steps"], first["note"]) == (3, 80, PATH_NOTE)
    found = client.get("/api/path", params={**asked, "start_path": 1}).json()
    account = found["account"]
    outputs = digits.model(digits.task.test[5:6])[0].detach()
    units = usual_units(outputs, int(digits.task.test_labels[5]))
    assert (account["said"], account["instead"]) == (units.said, units.instead)
    assert units.instead is not None
    spotlight = memory.attend(
        digits.model, digits.task.test[5:6], quantity=dualform.contrast(units.said, units.instead)
    )
    against = digits.task.test[[0, 180]]
    wanted = spotlight.path_contributions(by="label", against=against, over=dualform.bins("step", width=7))
    bars = {bar["group"]: bar["value"] for bar in account["bars"] if bar["kind"] == "group"}
    assert [bars[group] for group in wanted.groups] == pytest.approx(wanted.values[0].tolist(), rel=1e-4, abs=1e-5)
    assert sum(bar["value"] for bar in account["bars"]) == pytest.approx(account["output"], abs=1e-4)
    assert account["output"] == pytest.approx(float(outputs[units.said] - outputs[units.instead]), rel=1e-5)
    mean = digits.model(against).detach()[:, [units.said, units.instead]].diff(dim=1).mean()
    assert account["bars"][0]["kind"] == "reference"
    assert account["bars"][0]["value"] == pytest.approx(-float(mean), rel=1e-4)
    assert client.get("/api/path", params=asked).json()["account"] == account, "it is kept with the run"


def test_what_is_asked_by_default() -> None:
    outputs = torch.tensor([1.0, 3.0, 2.0])
    assert usual_units(outputs, 0) == PathUnits(1, 0), "said rather than the target"
    assert usual_units(outputs, 1) == PathUnits(1, 2), "where it is right, rather than the second"
    assert usual_units(outputs, None) == PathUnits(1, 2)
    assert usual_units(outputs[:1], None) == PathUnits(0, None)


def test_questions_that_make_no_sense_are_refused(client: httpx.Client, digits: SimpleNamespace) -> None:
    said = int(digits.model(digits.task.test[5:6]).argmax())
    for than, message in (
        (str(said), "compared with itself"),
        ("10", "whole number from 0 to 9"),
        ("x", "whole number"),
    ):
        answer = client.get("/api/path", params={"test": 5, "by": "label", "than": than})
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
        against = reference_inputs(small.session, None, 16)
        wanted = spotlight.path_contributions(by="source", against=against, over=step_bins(small.session))
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
