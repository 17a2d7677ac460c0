"""Runs at gs:// and az:// addresses, over obstore's own clients, on stand-ins for the two services."""

import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dualform
from dualform.errors import RemoteError, RunExistsError, RunNotFoundError, StoreError
from dualform.opening import copy_run
from helpers.object_storage import Task
from helpers.other_storages import BUCKET, KEY, OtherStorage, Service, serving_other

object_blobs = pytest.importorskip("dualform.store.object_blobs", reason="pip install 'dualform[cloud]'")
pytest.importorskip("obstore", reason="pip install 'dualform[cloud]'")
CLIENTS = {"gs": "GCSStore", "az": "AzureStore"}


@pytest.fixture(params=["gs", "az"])
def service(request: pytest.FixtureRequest) -> Service:
    found: Service = request.param
    return found


@pytest.fixture
def storage(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OtherStorage]:
    monkeypatch.setenv("DUALFORM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(object_blobs, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(object_blobs, "RETRIES", 1)
    with serving_other(service, tmp_path) as (found, endpoint, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(object_blobs, "endpoint", lambda scheme: endpoint)
        yield found


def test_a_run_is_recorded_asked_copied_and_resumed(service: Service, storage: OtherStorage, tmp_path: Path) -> None:
    address = f"{service}://{BUCKET}/runs/a"
    blobs = object_blobs.ObjectBlobs(address)
    assert type(blobs._store).__name__ == CLIENTS[service]
    task = Task()
    with dualform.record(task.model, task.optimizer, address, shard_bytes=4000) as recorder:
        task.train(recorder, range(3))
        with pytest.raises(RunExistsError, match="still being recorded to"):
            dualform.record(task.model, task.optimizer, address, resume=True).start()
    with dualform.record(task.model, task.optimizer, address, shard_bytes=4000, resume=True) as recorder:
        task.train(recorder, range(3, 6))
    assert {name.partition("/")[0] for name in storage.objects} == {"runs"}
    memory = dualform.open(address)
    assert memory.step == 6
    assert memory.verify(task.model).passed
    inputs = torch.randn(3, 24)
    copy_run(address, tmp_path / "copy")
    there, here = (dualform.open(place).attend(task.model, inputs)[""] for place in (address, tmp_path / "copy"))
    assert torch.equal(there.totals("label").values, here.totals("label").values)
    with pytest.raises(RunNotFoundError, match=f"{service}://{BUCKET}/none holds no manifest.json"):
        dualform.open(f"{service}://{BUCKET}/none")


def test_the_second_of_two_writers_is_refused(service: Service, storage: OtherStorage) -> None:
    """By the generation of the manifest at Google, by its ETag at Azure."""
    one, other = (object_blobs.ObjectBlobs(f"{service}://{BUCKET}/runs/b") for _ in range(2))
    tag = one.replace("manifest.json", b"first", was=None)
    with pytest.raises(StoreError, match=r"manifest\.json"):
        other.replace("manifest.json", b"also first", was=None)
    newer = other.replace("manifest.json", b"second", was=tag)
    with pytest.raises(StoreError, match=r"manifest\.json"):
        one.replace("manifest.json", b"third", was=tag)
    assert newer != tag
    assert one.load("manifest.json") == (b"second", newer)


def test_no_error_tells_a_key(service: Service, storage: OtherStorage) -> None:
    storage.refuses = True
    with pytest.raises(RemoteError, match="refused permission") as caught:
        dualform.open(f"{service}://{BUCKET}/runs/c")
    assert KEY not in "".join(traceback.format_exception(caught.value))
