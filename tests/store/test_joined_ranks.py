"""The files of several processes make one run: cut to what all of them have, continued by as many or by others."""

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dualform
from dualform.errors import CorruptError, FormatError, StoreError
from dualform.opening import published_stamp
from dualform.store.folder_blobs import FolderBlobs
from dualform.store.format import MANIFEST, rank_folder, shares_file
from dualform.store.manifest import Manifest
from dualform.store.reader import Run
from dualform.store.run_copy import copy_run
from dualform.store.share_writer import OWN_TENSORS
from dualform.store.tensors import TensorFile
from helpers.loops import batches, loss_of, mlp
from helpers.together import run_together

STEPS = 12
ROWS = 12  # of a batch of all processes


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def train(
    path: Path,
    checkpoint: Path,
    steps: Sequence[int],
    rank: int | None,
    size: int,
    *,
    flush_at: int = -1,
    **options: Any,
) -> None:
    """Train from a checkpoint, if there is one, and leave another: each process has its part of every batch's rows."""
    plain, saved = mlp(), None
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        plain.load_state_dict(saved["model"])
    model = plain if rank is None else DistributedDataParallel(plain)
    optimizer = adam(model)
    if saved is not None:
        optimizer.load_state_dict(saved["optimizer"])
    inputs = batches(STEPS, ROWS, 5)
    with dualform.record(model, optimizer, path, resume=saved is not None, **options) as recorder:
        for step in steps:
            rows = inputs[step].chunk(size)[rank or 0]
            recorder.annotate(half="first" if (rank or 0) == 0 else "second", weight=step)
            optimizer.zero_grad()
            loss_of(model(rows)).backward()
            optimizer.step()
            if step == flush_at:
                recorder.flush()
    if not rank:
        torch.save({"model": plain.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)


def in_processes(folder: Path, size: int, steps: Sequence[int], **options: Any) -> None:
    """Train in several processes: the run "run" from and to the checkpoint "checkpoint" of a folder."""
    meeting = folder / f"meeting{len(list(folder.iterdir()))}"
    meeting.mkdir()

    def work(rank: int) -> None:
        train(folder / "run", folder / "checkpoint", steps, rank, size, **options)

    run_together(meeting, work, size)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two processes, "run", whose shards do not end at the same steps."""
    folder = tmp_path_factory.mktemp("two")

    def work(rank: int) -> None:
        train(folder / "run", folder / "checkpoint", range(STEPS), rank, 2, flush_at=4 + 3 * rank)

    run_together(folder, work)
    return folder


@pytest.fixture
def copied(two: Path, tmp_path: Path) -> Path:
    """A copy of the run of two processes."""
    shutil.copytree(two / "run", tmp_path / "run")
    return tmp_path / "run"


def test_parts_lie_within_one_shard_of_each_process(two: Path) -> None:
    run = Run(two / "run")
    assert [(part.start, part.stop) for part in run.parts()] == [(0, 5), (5, 8), (8, 12)]
    assert [part.count("0") for part in run.parts()] == [60, 36, 48]
    table = dualform.open(two / "run").patterns("2").to_pydict()
    assert table["step"] == sorted(table["step"])
    assert table["rank"] == ([0] * 6 + [1] * 6) * STEPS
    assert table["half"] == (["first"] * 6 + ["second"] * 6) * STEPS
    assert table["weight"] == table["step"]


def test_facts_and_weights_are_kept_once(two: Path) -> None:
    run = Run(two / "run")
    other = run.others[0]
    assert other is not None
    assert all(shard.steps.num_rows == 0 for shard in other.shards)
    assert not other.published.files
    assert run.steps_table.num_rows == STEPS * 4
    assert run.published.processes == ((0, 2),)
    assert '"version": 3' in (two / "run" / MANIFEST).read_text()


def test_a_run_as_far_as_all_processes_have_published_it(copied: Path) -> None:
    other = copied / rank_folder(1)
    manifest = Manifest.read(other)
    cut = dataclasses.replace(manifest, shards=manifest.shards[:-1], closed=False)
    before = published_stamp(copied)
    (other / MANIFEST).write_text(cut.to_json())
    assert published_stamp(copied) != before
    run = Run(copied)
    assert (run.steps, run.published.steps, run.description.closed) == (8, STEPS, False)
    assert run.final is None
    assert [(part.start, part.stop) for part in run.parts()] == [(0, 5), (5, 8)]
    memory = dualform.open(copied)
    assert memory.verify(memory.weights()).passed


def test_processes_that_were_killed_are_not_missed_where_fewer_went_on(tmp_path: Path) -> None:
    in_processes(tmp_path, 2, range(4))
    other = tmp_path / "run" / rank_folder(1)
    (other / MANIFEST).write_text(dataclasses.replace(Manifest.read(other), closed=False).to_json())
    assert not Run(tmp_path / "run").description.closed
    train(tmp_path / "run", tmp_path / "checkpoint", range(4, 6), None, 1)
    run = Run(tmp_path / "run")
    assert run.published.processes == ((0, 2), (4, 1))
    assert run.description.closed
    assert run.final is not None
    assert dualform.open(tmp_path / "run").verify().passed


def test_a_process_whose_manifest_is_gone_is_missed(copied: Path) -> None:
    (copied / rank_folder(1) / MANIFEST).unlink()
    with pytest.raises(CorruptError, match="process 1 took part from step 0 on"):
        dualform.open(copied)


def test_nobody_looks_for_a_million_processes(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = Manifest.read(copied)
    (copied / MANIFEST).write_text(dataclasses.replace(manifest, processes=((0, 2), (8, 1_000_000))).to_json())
    looked: list[str] = []
    within = FolderBlobs.within

    def noted(blobs: FolderBlobs, folder: str) -> FolderBlobs:
        looked.append(folder)
        return within(blobs, folder)

    monkeypatch.setattr(FolderBlobs, "within", noted)
    with pytest.raises(CorruptError, match="process 2 took part from step 8 on"):
        Run(copied)
    assert looked == [rank_folder(1), rank_folder(2)]


def test_forged_processes_are_refused(copied: Path, tmp_path: Path) -> None:
    other = copied / rank_folder(1)
    with pytest.raises(FormatError, match="has the patterns of process 1 of a run"):
        dualform.open(other)
    manifest = Manifest.read(other)
    layers = {**manifest.layers, "0": dataclasses.replace(manifest.layers["0"], dtype="float16")}
    (other / MANIFEST).write_text(dataclasses.replace(manifest, layers=layers).to_json())
    with pytest.raises(FormatError, match="has other layers than the manifest of the run"):
        Run(copied)
    (other / MANIFEST).write_text(dataclasses.replace(manifest, processes=((0, 2),)).to_json())
    with pytest.raises(FormatError, match="process 1 says how many there are"):
        Run(copied)
    (other / MANIFEST).write_text(manifest.to_json())
    (next(iter((other / "shards").iterdir()))).unlink()
    with pytest.raises(CorruptError, match="is listed in the manifest but missing"):
        Run(copied)


def test_the_files_of_a_process_are_not_read_behind_a_link(copied: Path, tmp_path: Path) -> None:
    (copied / rank_folder(1)).rename(tmp_path / "elsewhere")
    (copied / rank_folder(1)).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="is a link, and none is followed inside of a run"):
        dualform.open(copied)


def test_a_copy_has_the_files_of_all_processes(two: Path, tmp_path: Path) -> None:
    copy_run(two / "run", tmp_path / "copy")
    memory = dualform.open(tmp_path / "copy")
    assert memory.verify().passed
    assert memory.verify().files == dualform.open(two / "run").verify().files


def test_a_run_goes_on_in_another_number_of_processes(tmp_path: Path) -> None:
    path, checkpoint = tmp_path / "run", tmp_path / "checkpoint"
    in_processes(tmp_path, 2, range(4))
    shutil.copy(checkpoint, tmp_path / "at 4")
    in_processes(tmp_path, 3, range(4, 7))
    shutil.copy(tmp_path / "at 4", checkpoint)  # the later steps are dropped
    in_processes(tmp_path, 3, range(4, 8))
    train(path, checkpoint, range(8, 10), None, 1)
    in_processes(tmp_path, 2, range(10, STEPS))
    run = Run(path)
    assert run.published.processes == ((0, 2), (4, 3), (8, 1), (10, 2))
    assert (run.steps, run.count("0"), run.description.closed) == (STEPS, STEPS * ROWS, True)
    memory = dualform.open(path)
    assert memory.verify().passed
    train(tmp_path / "one", tmp_path / "whole", range(STEPS), None, 1)
    expected = torch.load(tmp_path / "whole")["model"]
    torch.testing.assert_close(memory.trained(mlp()).state_dict(), expected, rtol=1e-4, atol=1e-5)


def test_shares_go_on_in_as_many_processes(tmp_path: Path) -> None:
    keep = dualform.Shares(by="half")
    in_processes(tmp_path, 2, range(4), keep=keep)
    in_processes(tmp_path, 2, range(4, 8), keep=keep, flush_at=6)
    run = Run(tmp_path / "run")
    own = run.published.shares
    assert own is not None
    assert (own.horizons, own.states) == ((7, 8), (7, 8))  # a process that is killed may have come to 7 only
    memory = dualform.open(tmp_path / "run")
    assert memory.verify().passed
    train(tmp_path / "one", tmp_path / "whole", range(8), None, 1)
    expected = dualform.open(tmp_path / "one")
    for name, shares in memory.shares("half").items():
        assert shares.labels == ("first", "second")
        torch.testing.assert_close(
            shares.start + shares.shares.double().sum(0), expected.weights()[name].double(), rtol=1e-4, atol=1e-5
        )
    with pytest.raises(AssertionError, match="goes on in the same number of processes"):
        in_processes(tmp_path, 3, range(8, 9), keep=keep)
    other = run.others[0]
    assert other is not None
    assert {name.split(".")[0] for name in TensorFile(other.blob(shares_file(8))).places} <= set(OWN_TENSORS)
