"""The run folder as something that others may write to: links, kills between two files, forked processes."""

import contextlib
import errno
import fcntl
import os
import signal
import time
from pathlib import Path

import pytest
import torch

import dualform
from dualform.errors import StoreError
from dualform.store.folder import own_files, remove_folder
from dualform.store.folder_blobs import FolderBlobs
from dualform.store.format import (
    LOCK,
    restart_file,
    shard_files,
    shares_file,
    shares_state_file,
    unexplained_file,
)
from dualform.store.manifest import Manifest
from helpers.small import batch, network, recorded, sgd, state, train


def test_a_kill_while_an_attachment_is_replaced_loses_nothing(run: Path) -> None:
    """Killed after the new files are there and before the manifest lists them, the run is as it was."""
    recorded(run, 2)
    memory = dualform.open(run)
    memory.add_tests(torch.zeros(6, 5), torch.arange(6))
    child = os.fork()
    if child == 0:
        Manifest.publish = lambda *_, **__: os._exit(9)  # type: ignore[method-assign]
        memory.add_tests(torch.zeros(3, 5), torch.arange(3))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    again = dualform.open(run)
    assert len(again.tests()[0]) == 6
    assert again.verify().passed
    again.add_tests(torch.zeros(2, 5), torch.arange(2))
    assert len(dualform.open(run).tests()[0]) == 2
    assert len(list((run / "media").glob("*"))) == 1, "what was replaced, and what the kill left, is gone"


def test_leftovers_of_a_killed_attachment_are_removed_by_the_next(run: Path) -> None:
    recorded(run, 1)
    (run / "media" / ".partial-0123456789abcdef0123456789abcdef").mkdir(parents=True)
    (run / "media" / "tests-0123456789abcdef.safetensors").write_bytes(b"half")
    (run / "media" / "notes of mine.txt").write_text("keep")
    dualform.open(run).add_media(labels=["cat"])
    names = {path.name for path in (run / "media").iterdir()}
    assert "notes of mine.txt" in names
    assert len(names) == 2


@pytest.mark.parametrize("folder", ["cache", "steps", "media", "shards", "shares", "unexplained", "restart"])
def test_nothing_behind_a_link_is_deleted(run: Path, tmp_path: Path, folder: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    names = ("000007.parquet", "000007.safetensors", "tests-0123456789abcdef.safetensors", "0" * 32 + ".safetensors")
    for name in names:
        (outside / name).write_text("precious")
    (outside / ".partial-0123456789abcdef0123456789abcdef").mkdir()
    run.mkdir()
    (run / folder).symlink_to(outside)
    FolderBlobs(run).remove_unpublished()
    assert list(own_files(run)) == []
    assert len(list(outside.iterdir())) == 5


def test_a_linked_file_of_a_run_is_not_deleted_through(run: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (run / "cache").mkdir(parents=True)
    (run / "cache" / ("0" * 32 + ".safetensors")).symlink_to(precious)
    (run / "cache" / "folder").mkdir()
    assert list(own_files(run)) == []


def test_resuming_a_run_with_a_linked_cache_deletes_nothing_there(run: Path, tmp_path: Path) -> None:
    model, optimizer = network(), None
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        train(model, optimizer, range(2), recorder)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / ("0" * 32 + ".safetensors")).write_text("precious")
    (run / "cache").symlink_to(outside)
    with dualform.record(model, optimizer, run, resume=True) as recorder:
        train(model, optimizer, range(2, 3), recorder)
    assert len(list(outside.iterdir())) == 1
    assert dualform.open(run).verify(model).passed


def test_nothing_is_written_through_a_linked_folder(run: Path, tmp_path: Path) -> None:
    recorded(run, 1)
    outside = tmp_path / "outside"
    outside.mkdir()
    (run / "media").symlink_to(outside)
    with pytest.raises(StoreError, match="is a link"):
        dualform.open(run).add_media(labels=["cat"])
    assert list(outside.iterdir()) == []


def test_shares_are_not_written_through_a_linked_folder(run: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    model = network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run, keep=dualform.Shares(by="label")) as recorder:
        train(model, optimizer, range(2), recorder)
        (run / "shares").symlink_to(outside)
        with pytest.raises(StoreError, match="is a link"):
            recorder.flush()
        (run / "shares").unlink()
    assert list(outside.iterdir()) == []


def test_leftovers_of_killed_shares_are_removed_when_the_recording_goes_on(run: Path) -> None:
    model = network()
    optimizer = sgd(model)
    for steps in (range(2), range(2, 3)):
        with dualform.record(model, optimizer, run, resume=True, keep=dualform.Shares(by="label")) as recorder:
            train(model, optimizer, steps, recorder)
        (run / "shares" / ".partial-0123456789abcdef0123456789abcdef").write_bytes(b"half")
        (run / "shares" / "000000009.safetensors").write_bytes(b"never listed")
    with dualform.record(model, optimizer, run, resume=True, keep=dualform.Shares(by="label")) as recorder:
        train(model, optimizer, range(3, 4), recorder)
    assert {path.name for path in (run / "shares").iterdir()} == {
        "000000004.safetensors",
        "state-000000004.safetensors",
    }


@pytest.mark.parametrize(
    "name", [*shard_files(7).values(), shares_file(7), shares_state_file(7), unexplained_file(7), restart_file(7)]
)
def test_every_name_of_the_format_is_known_as_ours(run: Path, name: str) -> None:
    (run / name).parent.mkdir(parents=True)
    (run / name).write_bytes(b"")
    assert FolderBlobs(run).list() == [name]


def test_a_linked_lock_is_not_followed(run: Path, tmp_path: Path) -> None:
    recorded(run, 1)
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (run / LOCK).symlink_to(precious)
    with pytest.raises(StoreError):
        dualform.open(run).add_media(labels=["cat"])
    assert precious.read_text() == "precious"


def test_a_forked_process_does_not_hold_the_lock(run: Path) -> None:
    run.mkdir()
    with FolderBlobs(run).lease() as mine:
        assert mine
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
    try:
        (run / LOCK).touch()
        with FolderBlobs(run).lease() as again:
            assert again, "the child inherited nothing of the lock"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_forked_process_that_leaves_the_block_ends_nothing(run: Path) -> None:
    model = network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        train(model, optimizer, range(2), recorder)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                before = state(model)
                recorder.annotate(sample=torch.arange(6))
                optimizer.zero_grad()
                model(batch(9)[0]).sum().backward()
                optimizer.step()  # trains the copy, and records nothing
                recorder.flush()
                recorder.__exit__(None, None, None)
                code = 0 if any(not torch.equal(before[name], now) for name, now in state(model).items()) else 2
            finally:
                os._exit(code)
        deadline = time.monotonic() + 20
        while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.02)
        if done == (0, 0):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert done != (0, 0), "the child hung"
        assert os.waitstatus_to_exitcode(done[1]) == 0
        assert (run / LOCK).exists()
        train(model, optimizer, range(2, 4), recorder)
    memory = dualform.open(run)
    assert memory.step == 4
    assert memory.verify(model).passed


def test_a_folder_is_removed_with_its_files_though_an_interrupt_came_before(tmp_path: Path) -> None:
    """`shutil.rmtree` would close a file descriptor twice where Ctrl-C comes as it closes it."""
    real, interrupts = os.close, [KeyboardInterrupt()]

    def close(descriptor: int) -> None:
        real(descriptor)
        if interrupts:
            raise interrupts.pop()

    folder = tmp_path / ".partial-0"
    folder.mkdir()
    (folder / "half").write_bytes(b"half")
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(os, "close", close)
        remove_folder(folder)
    assert not folder.exists()
    remove_folder(folder)


def test_a_disk_that_locks_only_files_open_for_writing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As network disks do, which lock byte ranges."""
    real = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    model = recorded(run, 5)
    assert dualform.open(run).verify(model).passed
