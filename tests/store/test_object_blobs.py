"""A run in object storage, on an S3 server whose answers fail, are late or get lost; and what is kept of it here."""

import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dualform
from dualform.errors import CorruptError, RemoteError, RunExistsError, RunNotFoundError, StoreError
from dualform.opening import copy_run
from dualform.store import object_lease, range_cache
from dualform.store.format import LOCK, MANIFEST
from dualform.store.object_address import parse_address
from helpers.object_storage import BUCKET, SECRET, ObjectStorage, Task, serving

object_blobs = pytest.importorskip("dualform.store.object_blobs", reason="pip install 'dualform[cloud]'")
ObjectBlobs, RangeCache = object_blobs.ObjectBlobs, range_cache.RangeCache
SHARD = "shards/000000.safetensors"


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStorage]:
    with serving() as found:
        yield found


@pytest.fixture(autouse=True)
def settings(server: ObjectStorage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Keep ranges in the test's own folder, and wait for nothing long."""
    monkeypatch.setenv("DUALFORM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(object_blobs, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(object_blobs, "RETRIES", 2)
    monkeypatch.setattr(object_blobs, "REQUEST_SECONDS", 5.0)
    yield
    server.faults.clear()
    server.before = None


def recorded(place: Any, steps: int = 6, **options: Any) -> Task:
    task = Task()
    with dualform.record(task.model, task.optimizer, place, shard_bytes=4000, **options) as recorder:
        task.train(recorder, range(steps))
    return task


def answer(place: Any, task: Task) -> torch.Tensor:
    """Ask something that reads every key, without the sums that earlier questions left."""
    inputs = torch.randn(3, 24, generator=torch.Generator().manual_seed(1))
    return dualform.open(place).attend(task.model, inputs)[""].attention()


# Faults ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["fail", "drop", "slow"])
def test_a_range_that_fails_for_a_moment_is_read_again(
    action: Any, server: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = server.address()
    task = recorded(address)
    expected = answer(ObjectBlobs(address, cache=RangeCache(Path(), 0)), task)
    monkeypatch.setattr(object_blobs, "REQUEST_SECONDS", 0.4 if action == "slow" else 5.0)
    server.spoil("GET", "shards/", action, times=2, seconds=0.8)
    assert torch.equal(answer(ObjectBlobs(address, cache=RangeCache(Path(), 0)), task), expected)
    assert [fault.times for fault in server.faults] == [0]


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("fail", "status 503"),
        ("refuse", "refused permission"),
        ("drop", "no connection"),
        ("slow", "no answer in 0.2 s"),
    ],
)
def test_a_range_that_fails_for_good_is_a_clear_error(
    action: Any, words: str, server: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = server.address()
    task = recorded(address)
    memory = dualform.open(address)
    monkeypatch.setattr(object_blobs, "REQUEST_SECONDS", 0.2)
    blobs = ObjectBlobs(address)
    server.spoil("GET", "shards/", action, times=100, seconds=0.5 if action == "slow" else 0)
    with pytest.raises(RemoteError, match=words) as caught:
        answer(blobs, task)
    text = "".join(traceback.format_exception(caught.value))
    assert address in str(caught.value)
    assert SECRET not in text
    assert "key-of-the-tests" not in text
    server.faults.clear()
    assert torch.equal(answer(blobs, task), memory.attend(task.model, torch.randn(
        3, 24, generator=torch.Generator().manual_seed(1)))[""].attention())  # fmt: skip


@pytest.mark.parametrize("action", ["drop", "lose", "fail"])
@pytest.mark.parametrize("part", ["shards/", MANIFEST])
def test_a_connection_that_is_lost_in_a_publish_loses_nothing(action: Any, part: str, server: ObjectStorage) -> None:
    address = server.address()
    task = Task()
    with dualform.record(task.model, task.optimizer, address, shard_bytes=4000) as recorder:
        task.train(recorder, range(3))
        recorder.flush()
        server.spoil("PUT", part, action, times=2)
        task.train(recorder, range(3, 6))
    assert [fault.times for fault in server.faults] == [0]
    memory = dualform.open(address)
    assert memory.step == 6
    assert memory.verify(task.model).passed


def test_a_storage_that_stays_away_ends_the_recording_with_what_was_published(server: ObjectStorage) -> None:
    address = server.address()
    task = Task()
    recorder = dualform.record(task.model, task.optimizer, address, shard_bytes=4000).start()
    task.train(recorder, range(3))
    recorder.flush()
    server.spoil("PUT", "shards/", "fail", times=1000)
    with pytest.raises(StoreError, match="status 503"):  # noqa: PT012 (which of the two notices first does not matter)
        task.train(recorder, range(3, 6))
        recorder.flush()
    server.faults.clear()
    with pytest.raises(StoreError):
        recorder.close()
    memory = dualform.open(address)
    assert memory.step == 3
    assert memory.verify(trained_to(3).model).passed


def test_a_run_that_was_replaced_since_it_was_opened_gives_no_wrong_answer(server: ObjectStorage) -> None:
    blobs = ObjectBlobs(server.address(), cache=RangeCache(Path(), 0))
    task = recorded(blobs)
    memory = dualform.open(ObjectBlobs(blobs.location, cache=RangeCache(Path(), 0)))
    content = bytearray(blobs.load(SHARD)[0])
    content[-5] ^= 1
    blobs.publish(SHARD, lambda file: file.write(content))
    for _ in range(2):
        with pytest.raises(RemoteError, match="was replaced after the run was opened"):
            memory.attend(task.model, torch.randn(2, 24))[""].attention()
    with pytest.raises(CorruptError, match="has checksum"):
        dualform.open(blobs).verify()


KILLED = """
import sys
import dualform
from helpers.object_storage import Task
task = Task()
recorder = dualform.record(task.model, task.optimizer, sys.argv[1], shard_bytes=4000).start()
task.train(recorder, range(3))
recorder.flush()
sys.stdout.write("published\\n")
sys.stdout.flush()
sys.stdin.readline()
task.train(recorder, range(3, 6))
recorder.flush()
"""


def test_a_recording_that_is_killed_in_a_publish_is_resumed(server: ObjectStorage) -> None:
    address = server.address()
    command = [sys.executable, "-c", KILLED, address]
    paths = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, **paths}, **pipes) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == "published\n"
        task = Task()
        with pytest.raises(RunExistsError, match="is being recorded to"):
            dualform.record(task.model, task.optimizer, address, resume=True).start()

        def kill(method: str, path: str) -> None:
            if method == "PUT" and "shards/000001" in path:
                child.kill()

        server.before = kill
        child.stdin.write("go on\n")
        child.stdin.flush()
        child.wait(30)
    server.before = None
    assert dualform.open(address).step == 3
    task = trained_to(3)
    with dualform.record(task.model, task.optimizer, address, resume=True, shard_bytes=4000) as recorder:
        assert recorder.step == 3, "the lease of a process that is gone is over at once on its machine"
        task.train(recorder, range(3, 6))
    memory = dualform.open(address)
    assert memory.step == 6
    assert memory.verify(task.model).passed
    assert LOCK not in [name for _, name in ObjectBlobs(address)._objects()]


def trained_to(step: int) -> Task:
    """Return a task at a step, as a checkpoint would give it."""
    from dualform.store.memory_blobs import MemoryBlobs

    return recorded(MemoryBlobs(), step)


# The lease ------------------------------------------------------------------------------------------------------------


def test_a_lease_of_another_machine_ends_by_its_age(server: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = ObjectBlobs(server.address())
    foreign = {"holder": "x", "machine": "elsewhere", "pid": 1, "process": "1"}
    assert blobs.put_lease(json.dumps(foreign).encode(), None)
    with blobs.lease() as mine:
        assert not mine
    monkeypatch.setattr(object_lease, "LEASE_SECONDS", -1.0)
    with blobs.lease() as mine:
        assert mine


def test_who_has_lost_its_lease_writes_no_more(server: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_lease, "LEASE_SECONDS", 0.2)
    blobs = ObjectBlobs(server.address())
    with blobs.lease() as mine:
        assert mine
        blobs.publish(SHARD, lambda file: file.write(b"x"))
        held = blobs.lease_content()
        assert held is not None
        while (now := blobs.lease_content()) is not None and not blobs.put_lease(b"{}", now[1]):
            pass  # between two renewals
        lease = blobs._lease
        assert lease is not None
        for _ in range(200):
            if lease.lost:
                break
            threading.Event().wait(0.01)
        with pytest.raises(StoreError, match="could not be renewed"):
            blobs.publish(SHARD, lambda file: file.write(b"y"))
        with pytest.raises(StoreError, match="could not be renewed"):
            blobs.replace(MANIFEST, b"y", was=None)
    assert blobs.load(SHARD)[0] == b"x"
    assert blobs.lease_content() is not None, "the lease of somebody else stays"


# The cache of ranges --------------------------------------------------------------------------------------------------


def test_the_cache_is_bounded_and_a_damaged_block_is_read_again(server: ObjectStorage, tmp_path: Path) -> None:
    cache = RangeCache(tmp_path / "ranges", 5 * range_cache.BLOCK_BYTES)
    blobs = ObjectBlobs(server.address(), cache=cache)
    names = [f"shards/{number:06d}.safetensors" for number in range(4)]
    contents = {name: torch.randint(256, (700_000,), dtype=torch.uint8).numpy().tobytes() for name in names}
    for name, content in contents.items():
        blobs.publish(name, lambda file, content=content: file.write(content))
    for name in [*names, *reversed(names)]:
        for offset, count in ((0, 8), (300_000, 400_000), (262_140, 8)):
            assert bytes(blobs.ranges(name, [(offset, count)])[0]) == contents[name][offset : offset + count]
        assert 0 < cache.used() <= cache.limit
    read = blobs.traffic.bytes_read
    assert bytes(blobs.ranges(names[0], [(0, 700_000)])[0]) == contents[names[0]]
    assert blobs.traffic.bytes_read == read, "what was read is here"
    assert (tmp_path / "ranges").stat().st_mode & 0o077 == 0
    for path in (tmp_path / "ranges").iterdir():
        if not path.name.endswith(range_cache.SUMS):
            with path.open("rb+") as file:
                file.seek(300_000)
                file.write(b"spoiled")
    assert bytes(blobs.ranges(names[0], [(0, 700_000)])[0]) == contents[names[0]]
    assert blobs.traffic.bytes_read > read


def test_totals_from_sums_that_are_kept_read_less_than_a_hundredth_of_the_run(server: ObjectStorage) -> None:
    address = server.address()
    task = Task(512)
    with dualform.record(task.model, task.optimizer, address, shard_bytes=4 << 20) as recorder:
        task.train(recorder, range(32), batch=256)
    inputs = torch.randn(5, 512)
    first = dualform.open(address).attend(task.model, inputs)[""].totals("label").values
    blobs = ObjectBlobs(address, cache=RangeCache(Path(), 0))
    memory = dualform.open(blobs)
    size = memory.info().bytes
    before = blobs.traffic.bytes_read
    assert torch.equal(memory.attend(task.model, inputs)[""].totals("label").values, first)
    assert size > 16e6
    assert blobs.traffic.bytes_read - before < 0.01 * size
    assert blobs.traffic.bytes_read < 0.01 * size, "with all that was read to open it"


# Addresses and credentials --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    ["s3://key:hidden@bucket/run", "s3://bucket/run?token=hidden", "http://hidden/run", "s3://bucket", "s3:///run"],
)
def test_an_address_is_a_place_and_nothing_else(address: str) -> None:
    with pytest.raises(RemoteError, match=r"expected|Give the bucket") as caught:
        dualform.open(address)
    assert "hidden" not in str(caught.value)


def test_the_parts_of_an_address() -> None:
    found = parse_address("s3://bucket/runs/a/")
    assert (found.bucket, found.key("x"), str(found)) == ("bucket", "runs/a/x", "s3://bucket/runs/a")


def test_nothing_of_the_credentials_is_kept(server: ObjectStorage, tmp_path: Path) -> None:
    address = server.address()
    recorded(address)
    blobs = ObjectBlobs(address)
    every = b"".join(blobs.load(name)[0] for name in blobs.list())
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert SECRET.encode() not in every + kept
    assert SECRET not in repr(vars(blobs))


def test_what_is_missing_is_named(server: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunNotFoundError, match=f"s3://{BUCKET}/none holds no manifest.json"):
        dualform.open(f"s3://{BUCKET}/none")
    task = Task()
    with pytest.raises(RemoteError, match="no bucket 'nowhere'"):
        dualform.record(task.model, task.optimizer, "s3://nowhere/run").start()
    blobs = ObjectBlobs(server.address())
    blobs.publish("media/tests.safetensors", lambda file: file.write(b"x"))
    with pytest.raises(RunExistsError, match="holds no run"):
        dualform.record(task.model, task.optimizer, blobs).start()
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(RemoteError, match=r"pip install 'dualform\[cloud\]'"):
        dualform.open(f"s3://{BUCKET}/run")


# Copies ---------------------------------------------------------------------------------------------------------------


def test_a_run_is_copied_there_and_back(server: ObjectStorage, tmp_path: Path) -> None:
    address = server.address()
    task = recorded(tmp_path / "run")
    copied = copy_run(tmp_path / "run", address)
    assert copied.location == address
    copy_run(address, tmp_path / "back")
    files = {path.relative_to(tmp_path / "run"): path.read_bytes() for path in (tmp_path / "run").rglob("*.*")}
    back = {path.relative_to(tmp_path / "back"): path.read_bytes() for path in (tmp_path / "back").rglob("*.*")}
    assert {name: content for name, content in files.items() if name.parts[0] != "cache"} == back
    assert len(back) == copied.files
    assert dualform.open(address).verify(task.model).passed
    with pytest.raises(RunExistsError, match="holds a recorded run already"):
        copy_run(tmp_path / "run", address)


def test_a_copy_that_fails_is_no_run(server: ObjectStorage, tmp_path: Path) -> None:
    address = server.address()
    recorded(tmp_path / "run")
    server.spoil("PUT", "calls/", "refuse", times=1000)
    with pytest.raises(RemoteError, match="refused permission"):
        copy_run(tmp_path / "run", address)
    server.faults.clear()
    with pytest.raises(RunNotFoundError):
        dualform.open(address)
    content = bytearray((tmp_path / "run" / SHARD).read_bytes())
    content[-3] ^= 1
    (tmp_path / "run" / SHARD).write_bytes(content)
    with pytest.raises(CorruptError, match="is not the file that the manifest lists"):
        copy_run(tmp_path / "run", server.address())


def test_a_profile_gives_the_credentials(
    server: ObjectStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("boto3", reason="a profile of AWS needs boto3")
    lines = ["[tests]", "aws_access_key_id = of-the-profile", f"aws_secret_access_key = {SECRET}"]
    (tmp_path / "credentials").write_text("\n".join(lines))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_PROFILE", "tests")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    blobs = ObjectBlobs(server.address())
    blobs.publish(SHARD, lambda file: file.write(b"x"))
    assert blobs.load(SHARD)[0] == b"x"
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(RemoteError, match="pip install boto3"):
        ObjectBlobs(server.address())
