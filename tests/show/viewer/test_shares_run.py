"""The viewer, the report and the command line on a run that keeps shares by group and no patterns."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

import dualform
from dualform import cli
from dualform.experiments.image_training import ClassifierRecipe, Phase, train_classifier
from helpers.served import Running

NEEDED = "keeps shares by label"


@pytest.fixture(scope="module")
def shares_folder(digits: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The training of the run of digits, of which shares by label, and by label and step, are kept."""
    folder = tmp_path_factory.mktemp("shares") / "run"
    shares = dualform.Shares(by=[["label"], ["label", dualform.bins("step", width=5)]], at=[40], groups=160)
    recipe = ClassifierRecipe(hidden=(24, 16), learning_rate=0.05, batch=64)
    train_classifier([digits.task], [Phase(("digits",), 80)], recipe, folder, seed=0, keep=shares)
    patterns = dualform.open(digits.folder)
    dualform.open(folder).add_tests(*patterns.tests(), images=patterns.test_images())
    return folder


@pytest.fixture(scope="module")
def shares_run(shares_folder: Path) -> Iterator[Running]:
    """A server on the run that keeps shares."""
    server = Running(shares_folder)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def asked(shares_run: Running) -> Iterator[httpx.Client]:
    with shares_run.client() as found:
        yield found


def get(client: httpx.Client, path: str, **parameters: Any) -> Any:
    answer = client.get(path, params={"test": 5, "by": "label", **parameters})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_what_shares_answer_is_what_patterns_answer(asked: httpx.Client, client: httpx.Client) -> None:
    run = get(asked, "/api/run")
    assert run["shares"] == ["label", "(label, step:5)"]
    assert run["exact"]
    assert run["patterns"] == get(client, "/api/run")["patterns"]
    assert [one["by"] for one in run["groupings"]] == ["label", "label,step:5"]
    for of in ("attention", "contribution"):
        found, wanted = (get(one, "/api/layers", of=of) for one in (asked, client))
        assert found["groups"] == wanted["groups"]
        for mine, other in zip(found["layers"], wanted["layers"], strict=True):
            assert mine["totals"] == pytest.approx(other["totals"], rel=1e-4, abs=1e-4)
    for mask in ({"g": "9"}, {"g": ["3", "4"], "only": "1"}):
        assert get(asked, "/api/mask", **mask) == get(client, "/api/mask", **mask)
        found, wanted = (get(one, "/api/prediction", **mask) for one in (asked, client))
        assert found["after_name"] == wanted["after_name"]


def test_panels_that_need_patterns_say_so(asked: httpx.Client) -> None:
    for path in ("/api/top", "/api/curves"):
        assert NEEDED in get(asked, path, layer="layers.2")["needs_patterns"]
    assert "needs groups by 'sample'" in get(asked, "/api/mask", p="3")["needs_patterns"]
    assert "sample" in get(asked, "/api/sample", sample=3)["needs_patterns"]
    time = get(asked, "/api/time", layer="layers.2")
    assert time["width"] == 5
    assert sum(time["grid"][3]) == pytest.approx(get(asked, "/api/layers")["layers"][2]["totals"][3])
    reasons = [layer["reason"] for layer in get(asked, "/api/layers", of="effect")["layers"]]
    assert all("its patterns are not kept" in reason for reason in reasons)
    magnitude = get(asked, "/api/layers", of="magnitude")["layers"]
    assert all(layer["totals"] or "magnitude, which sums of keys" in layer["reason"] for layer in magnitude)


def test_the_badge_shows_what_is_unexplained(asked: httpx.Client, shares_run: Running) -> None:
    shares_run.server.opened.session().prepare(("label",)).thread.join()
    badge = get(asked, "/api/badge")
    assert badge["state"] == "passed", badge
    assert all(layer["unexplained"] is not None for layer in badge["layers"])
    assert badge["plan"]["bins"] == 1


def test_the_report_says_what_it_leaves_out(asked: httpx.Client) -> None:
    page = asked.get("/report.html", params={"test": 5})
    assert page.status_code == 200
    assert "E. Without each group" in page.text
    assert "B to D. Single patterns" in page.text
    assert NEEDED in page.text
    assert "; unexplained " in page.text


def test_commands(shares_folder: Path) -> None:
    folder = str(shares_folder)

    def run(*arguments: str) -> tuple[int, str]:
        found = CliRunner().invoke(cli.app, [*arguments])
        return found.exit_code, found.output + ("" if found.exception is None else str(found.exception))

    code, text = run("info", folder)
    assert code == 0
    assert "shares: by label, or (label, step:5); after steps 40, 80" in text
    code, text = run("verify", folder, "--json")
    assert code == 0
    assert [layer["explained"] for layer in json.loads(text)["layers"]] == pytest.approx([1.0] * 3)
    code, text = run("attend", folder, "--by", "label", "--trust")
    assert code == 0
    assert "total attention" in text
    assert "top attention" not in text
    code, text = run("mask", folder, "--without", "label = 3", "--trust")
    assert code == 0
    assert "predictions change" in text
    for asked, message in (
        (("attend", folder, "--trust"), "ask for totals, --by label"),
        (("attend", folder, "--by", "label", "--top", "3", "--trust"), "needs patterns"),
        (("mask", folder, "--without", "sample = 3", "--trust"), "needs groups by 'sample'"),
        (("mask", folder, "--at", "7", "--trust"), "keeps shares after steps 40, 80"),
    ):
        code, text = run(*asked)
        assert code != 0
        assert message in text


@pytest.mark.browser
def test_the_page_shows_notes_and_no_failures(chromium: Any, shares_run: Running) -> None:
    context = chromium.new_context(viewport={"width": 1400, "height": 900}, reduced_motion="reduce")
    page = context.new_page()
    errors: list[str] = []
    page.on("console", lambda m: errors.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(shares_run.address + "&test=5")
    page.wait_for_selector("body[data-ready=all]")
    for panel in ("curves", "top"):
        assert NEEDED in page.inner_text(f"#{panel} .needs-patterns")
    assert "unexplained" in page.wait_for_selector(".badge.good").inner_text()
    assert page.query_selector(".failure") is None
    page.click("#mask .chip[data-group='9']")
    page.wait_for_selector("#mask-outcome:has-text('predictions change')")
    assert "keeps shares by label" in page.inner_text("#mask")
    assert errors == []
    context.close()
