"""A run folder that changes under a running viewer: files go and come back, manifests change, recordings go on."""

import functools
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch

import dualform
from dualform.attend.weights import GroupWeights
from dualform.errors import CorruptError
from dualform.progress import bar
from dualform.show import preparation
from dualform.show.job import Cancelled
from dualform.show.lru_cache import LruCache
from dualform.show.viewer.opened import Opened
from dualform.store.shard_reading import Shard
from helpers.served import Running
from helpers.small_models import pictures, record_pictures


class Changing(Running):
    """A server on a run folder that the test may change; `get(path)` asks it as a client does."""

    get: Callable[..., httpx.Response]

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder


@pytest.fixture
def changing(tmp_path):
    record_pictures(tmp_path / "run")
    server = Changing(tmp_path / "run")
    with server.client() as client:
        server.get = client.get
        yield server
    server.stop()


def move_away(path: Path) -> None:
    path.rename(path.with_name("away"))


def put_back(path: Path) -> None:
    path.with_name("away").rename(path)


@pytest.mark.parametrize("name", ["shards/000000.safetensors", "calls/000000.parquet", "final.safetensors"])
def test_a_missing_file_is_503_until_it_is_back(changing, name):
    path = changing.folder / name
    move_away(path)
    found = changing.get("/api/run")
    assert found.status_code == 503
    assert name in found.json()["error"]
    put_back(path)
    assert changing.get("/api/run").status_code == 200


@pytest.mark.parametrize("content", ["", "{", '{"format": "dualform", "version": 1}'])
def test_half_a_manifest_is_503_until_it_is_whole(changing, content):
    assert changing.get("/api/run").status_code == 200
    path = changing.folder / "manifest.json"
    move_away(path)
    path.write_text(content, encoding="utf-8")
    assert changing.get("/api/run").status_code == 503
    put_back(path)
    assert changing.get("/api/run").status_code == 200


def test_a_file_that_the_system_cannot_read_is_503(changing, monkeypatch):
    def fail(*_):
        raise PermissionError(13, "Permission denied", "annotations/000000.parquet")

    monkeypatch.setattr(Shard, "addresses", fail)
    found = changing.get("/api/layers?by=label")
    assert found.status_code == 503
    assert "cannot be read" in found.json()["error"]


def test_a_manifest_that_is_away_for_a_moment_stops_no_preparation(changing, monkeypatch):
    go_on = threading.Event()
    prepare = GroupWeights.prepare

    def wait_and_prepare(weights):
        go_on.wait(20)
        return prepare(weights)

    monkeypatch.setattr(GroupWeights, "prepare", wait_and_prepare)
    assert changing.get("/api/badge?by=label").json()["state"] == "preparing"
    move_away(changing.folder / "manifest.json")
    assert changing.get("/api/run").status_code == 404
    put_back(changing.folder / "manifest.json")
    go_on.set()
    while (state := changing.get("/api/badge?by=label").json()["state"]) == "preparing":
        time.sleep(0.02)
    assert state == "passed"


def badge_state(changing):
    while (found := changing.get("/api/badge?by=label").json())["state"] == "preparing":
        time.sleep(0.02)
    return found["state"]


def test_a_badge_that_failed_while_a_file_was_away_is_prepared_again(changing):
    path = changing.folder / "initial.safetensors"
    assert changing.get("/api/run").status_code == 200
    move_away(path)
    assert badge_state(changing) == "failed"
    assert badge_state(changing) == "failed"
    put_back(path)
    assert badge_state(changing) == "passed"


def test_a_long_preparation_that_failed_is_not_repeated_at_once(changing, monkeypatch):
    monkeypatch.setattr(preparation, "QUICK_SECONDS", 0.0)
    tries = []

    def fail(weights):
        tries.append(time.monotonic())
        time.sleep(0.5)
        raise CorruptError("a file is gone")

    monkeypatch.setattr(GroupWeights, "prepare", fail)
    assert badge_state(changing) == "failed"
    assert badge_state(changing) == "failed"
    assert len(tries) == 1
    time.sleep(0.6)
    changing.get("/api/badge?by=label")
    assert len(tries) == 2


def go_on_recording(folder: Path, steps: int = 2) -> None:
    """Resume the run at its end."""
    model = dualform.open(folder).trained(pictures())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(5, 1, 6, 6)
    with dualform.record(model, optimizer, folder, resume=True, factory="small_models:pictures") as recorder:
        for _ in range(steps):
            recorder.annotate(sample=torch.arange(5), label=torch.arange(5) % 3)
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()


def test_an_older_manifest_with_newer_weights_is_503(changing):
    path = changing.folder / "manifest.json"
    shutil.copy(path, path.with_name("older"))
    go_on_recording(changing.folder)
    newer = changing.get("/api/run")
    assert newer.json()["steps"] == 14
    move_away(path)
    path.with_name("older").rename(path)
    found = changing.get("/api/run")
    assert found.status_code == 503
    assert "final.safetensors is not the file that the manifest lists" in found.json()["error"]
    put_back(path)
    assert changing.get("/api/run").json() == newer.json()


def test_a_question_that_failed_while_the_run_changed_is_asked_again(changing):
    opened = changing.server.opened
    sessions = []

    def question(session):
        sessions.append(session)
        if len(sessions) == 1:
            dualform.open(changing.folder).add_tests(torch.zeros(4, 1, 6, 6))
            raise CorruptError("media/tests.safetensors is gone")
        return len(session.tests)

    assert opened.answer(question) == 4
    assert sessions[0] is not sessions[1]


@pytest.mark.parametrize("error", [CorruptError("gone"), ValueError("other")])
def test_a_question_that_failed_for_another_reason_is_not(changing, error):
    asked = []

    def question(session):
        asked.append(session)
        raise error

    with pytest.raises(type(error)):
        changing.server.opened.answer(question)
    assert len(asked) == 1


def test_a_question_that_was_broken_off_is_not_asked_again(changing):
    asked = []

    def question(session):
        asked.append(session)
        (changing.folder / "manifest.json").touch()
        raise Cancelled

    with pytest.raises(Cancelled):
        changing.server.opened.answer(question)
    assert len(asked) == 1


def test_a_session_that_is_replaced_stops_its_preparations(changing, monkeypatch):
    opened = changing.server.opened
    monkeypatch.setattr(GroupWeights, "prepare", lambda weights: time.sleep(0.3))
    before = opened.session().prepare(("label",))
    (changing.folder / "manifest.json").touch()
    assert opened.session() is not None
    assert before.job.cancelled


def test_preparations_of_many_groupings_do_not_pile_up(tmp_path, monkeypatch):
    """Each distinct grouping that is asked for prepares in a thread; the oldest ones are stopped."""
    record_pictures(tmp_path / "run")
    opened = Opened(tmp_path / "run", trust=True)

    def work(weights):
        while True:  # a bar raises where nobody waits any more
            time.sleep(0.01)
            with bar("preparing", total=None):
                pass

    monkeypatch.setattr(GroupWeights, "prepare", work)
    session = opened.session()
    found = [session.prepare((dualform.bins("step", width=width),)) for width in range(1, 31)]
    assert sum(not one.job.cancelled for one in found) <= 8
    deadline = time.monotonic() + 10
    while sum(one.thread.is_alive() for one in found) > 8 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sum(one.thread.is_alive() for one in found) <= 8
    opened.close()


def test_a_value_that_makes_room_is_told():
    gone: list[int] = []
    kept = LruCache[int](2, dropped=gone.append)
    for number in range(4):
        kept.get(number, functools.partial(int, number))
    assert gone == [0, 1]
