"""The viewer on a run that keeps steps: nothing is replayed before somebody asks, and one replay answers all panels."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import dualform
from dualform.show.viewer.guard import PAGE_HEADER
from helpers import trainings
from helpers.served import Running
from helpers.trainings import batch, train_mlp

PANELS = ("/api/layers", "/api/curves", "/api/time", "/api/top")
QUESTIONS = [f"{path}?test=1&by=label" for path in PANELS]
WANTED = threading.Event()  # lets the training below go on
WANTED.set()


def train_slowly(recording: Any) -> Any:
    """The training of the small network, which a test can stop in its middle."""
    WANTED.wait(20)
    return train_mlp(recording)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dualform.record_training(train_mlp, tmp_path / "run", factory="helpers.trainings:Mlp")
    dualform.open(tmp_path / "run").add_tests(*batch("mlp", 50))
    return tmp_path / "run"


@pytest.fixture
def server(folder: Path) -> Iterator[Running]:
    running = Running(folder, train=train_slowly)
    yield running
    WANTED.set()
    running.stop()


def ask(client: httpx.Client, path: str, **parameters: Any) -> Any:
    answer = client.get(path, params={"test": 1, "by": "label", **parameters})
    assert answer.status_code == 200, answer.text
    return answer.json()


def start(client: httpx.Client, questions: list[str]) -> dict[str, Any]:
    """Begin a replay as the page does, and wait for its end."""
    header = {PAGE_HEADER: client.get("/api/page").json()["token"]}
    begun = client.post("/api/replay", params={"q": questions}, headers=header)
    assert begun.status_code == 200, begun.text
    while (state := client.get("/api/replay").json())["state"] == "running":
        time.sleep(0.02)
    found: dict[str, Any] = state
    return found


def test_nothing_is_replayed_before_somebody_asks(server: Running) -> None:
    with server.client() as client:
        run = ask(client, "/api/run")
        assert run["replays"]
        assert ask(client, "/api/prediction")["before_name"]
        for path in PANELS:
            found = ask(client, path)
            assert "has to be run again" in found["needs_replay"], path
            assert found["seconds"] >= 0
        assert "run again" in ask(client, "/api/prediction", g="1")["needs_replay"], "a mask takes one too"
        while (badge := ask(client, "/api/badge"))["state"] == "preparing":
            time.sleep(0.02)
        assert badge["state"] == "needs replay"
        assert client.get("/report.html").status_code == 409
        assert server.server.opened.session().memory._run.replays == 0


@pytest.mark.parametrize("held", [True, False], ids=["patterns held", "patterns gone by"])
def test_one_replay_answers_all_panels(server: Running, folder: Path, held: bool) -> None:
    source = server.server.opened.session().memory._run
    if not held:
        source._held_bytes = 0
    with server.client() as client:
        assert ask(client, "/api/groups")["groups"] == [0, 1, 2]
        state = start(client, [*QUESTIONS, "/api/badge?by=label&wait=1"])
        assert (state["state"], state["error"]) == ("done", "")
        assert ask(client, "/api/badge")["state"] == "passed"
        assert ask(client, "/api/mask", g="1")["tests"] == 4
        totals, curves, along, top = (ask(client, path) for path in PANELS)
        rounds = source.replays
        assert rounds == 1 if held else rounds <= 2, "top patterns need the sum of all attention too"
        model = server.server.opened.session().model
        memory = dualform.open(folder, train=train_mlp)
        spotlight = memory.attend(model, batch("mlp", 50)[0][1:2])
        for layer in totals["layers"]:
            wanted = spotlight[layer["layer"]].totals("label")
            assert layer["totals"] == pytest.approx(wanted.values[0].tolist(), rel=1e-5)
        assert sum(map(sum, along["grid"])) == pytest.approx(sum(totals["layers"][-1]["totals"]), rel=1e-4)
        assert top["cards"][0]["value"] == pytest.approx(max(map(max, curves["curves"])), rel=1e-5)
        assert source.replays == rounds, "what was answered needs no further replay"
    again = Running(folder, train=train_mlp)  # another process finds totals and top patterns in the cache
    with again.client() as client:
        assert ask(client, "/api/layers")["layers"] == totals["layers"]
        assert again.server.opened.session().memory._run.replays == 0
    again.stop()


def test_where_an_answer_comes_from_takes_a_replay_too(server: Running) -> None:
    question = {"references": 0, "start_path": 1}
    with server.client() as client:
        assert ask(client, "/api/path", references=0)["account"] is None
        assert "run again" in ask(client, "/api/path", **question)["needs_replay"]
        assert start(client, ["/api/path?test=1&by=label&references=0&start_path=1"])["state"] == "done"
        account = ask(client, "/api/path", **question)["account"]
        assert sum(bar["value"] for bar in account["bars"]) == pytest.approx(account["output"], abs=1e-4)
        assert ask(client, "/api/path", references=0)["account"] == account, "it is kept with the run"


def test_a_replay_shows_its_progress_and_can_be_cancelled(server: Running) -> None:
    WANTED.clear()
    with server.client() as client:
        header = {PAGE_HEADER: client.get("/api/page").json()["token"]}
        assert client.post("/api/replay", params={"q": QUESTIONS}, headers=header).json()["state"] == "running"
        assert "needs_replay" in ask(client, "/api/top"), "questions do not wait for it"
        client.post("/api/replay/cancel", headers=header)
        WANTED.set()
        while (state := client.get("/api/replay").json())["state"] == "running":
            time.sleep(0.02)
        assert state["state"] == "cancelled"
        assert start(client, QUESTIONS)["state"] == "done", "and can be begun again"


def test_who_may_begin_a_replay(server: Running) -> None:
    with server.client() as client:
        header = {PAGE_HEADER: client.get("/api/page").json()["token"]}
        assert client.post("/api/replay", params={"q": QUESTIONS}).status_code == 403
        assert client.post("/api/replay", params={"q": QUESTIONS}, headers={PAGE_HEADER: "x"}).status_code == 403
        foreign = {**header, "origin": "http://elsewhere.example"}
        assert client.post("/api/replay", params={"q": QUESTIONS}, headers=foreign).status_code == 403
        assert client.post("/api/layers", headers=header).status_code == 405
        assert client.post("/api/replay", params={"q": []}, headers=header).status_code == 400
        assert client.post("/api/replay", params={"q": ["/etc/passwd"]}, headers=header).status_code == 400
        assert client.post("/api/replay", content=b"{}", headers=header).status_code == 413
    with httpx.Client(base_url=server.base) as stranger:
        assert stranger.post("/api/replay", params={"q": QUESTIONS}, headers=header).status_code == 403
    assert server.server.opened.session().memory._run.replays == 0


def test_a_training_that_may_not_be_called_is_named(folder: Path) -> None:
    running = Running(folder, trust=False, model="helpers.trainings:Mlp")
    with running.client() as client:
        found = ask(client, "/api/top")
        assert "helpers.trainings:train_mlp" in found["needs_patterns"]
        assert "--trust" in found["needs_patterns"]
    running.stop()


def test_a_training_that_differs_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running = Running(folder, train=train_mlp)
    monkeypatch.setattr(trainings, "batch", lambda kind, step: batch(kind, step + 1))
    with running.client() as client:
        state = start(client, QUESTIONS)
        assert state["state"] == "failed"
        assert "step 0" in state["error"] or "input" in state["error"]
    running.stop()


@pytest.mark.browser
@pytest.mark.parametrize("width", [1400, 390])
def test_the_page_offers_a_replay_and_shows_what_it_brings(
    chromium: Any, server: Running, axe: str, width: int
) -> None:
    context = chromium.new_context(viewport={"width": width, "height": 900}, reduced_motion="reduce")
    page = context.new_page()
    errors: list[str] = []
    page.on("console", lambda m: errors.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(server.address + "&test=1")
    page.wait_for_selector("body[data-ready=all]")
    assert page.locator("button:has-text('Replay the training for this test (about')").count() == 4
    page.evaluate(axe)
    assert page.evaluate("axe.run().then(r => r.violations.map(v => v.id))") == []
    WANTED.clear()
    page.click("#top button:has-text('Replay the training')")
    page.wait_for_selector("#curves progress")
    assert page.is_visible("#layers button:has-text('Cancel')")
    WANTED.set()
    for panel in ("layers svg", "curves svg", "time svg", "top .card"):
        page.wait_for_selector(f"#{panel}")
    assert page.locator("button:has-text('Replay the training')").count() == 0
    assert "exact: rebuild error" in page.wait_for_selector(".badge.good").inner_text()
    page.click("#mask .chip[data-group='1']")
    page.wait_for_selector("#mask-outcome:has-text('predictions change')")
    assert server.server.opened.session().memory._run.replays == 1, "masks come with the same replay"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert errors == []
    context.close()
