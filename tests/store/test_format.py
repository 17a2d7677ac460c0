"""The golden facts of the run folder, and the publishing of single files."""

import dataclasses
import json
import os
import struct
from pathlib import Path
from typing import BinaryIO, Literal

import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch

import dualform
from dualform.errors import CorruptError, FormatError, RunNotFoundError
from dualform.store.blobs import FileEntry
from dualform.store.folder import PARTIAL
from dualform.store.folder_blobs import FolderBlobs
from dualform.store.format import LOCK
from dualform.store.manifest import Manifest, sealed
from dualform.store.tensors import TensorFile, publish_tensors
from helpers.blob_files import file_blob, file_checksum
from helpers.small import files, listed, network, recorded, sgd, train


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed run of 7 steps in 3 shards."""
    path = tmp_path_factory.mktemp("format") / "run"
    recorded(path, 7)
    return path


# The folder -------------------------------------------------------------------------------------------------------


def test_a_run_holds_these_files_and_no_others(whole: Path) -> None:
    kinds = {"shards": "safetensors", "calls": "parquet", "annotations": "parquet", "steps": "parquet"}
    shards = {f"{kind}/{index:06d}.{ending}" for kind, ending in kinds.items() for index in range(3)}
    assert files(whole) == shards | {"manifest.json", "initial.safetensors", "final.safetensors"}
    assert files(whole) == listed(whole)


def test_the_manifest_has_these_entries(whole: Path) -> None:
    manifest = json.loads((whole / "manifest.json").read_text(encoding="utf-8"))
    assert list(manifest)[:3] == ["format", "version", "steps"]
    assert list(manifest)[-1] == "xxh3"
    assert (manifest["format"], manifest["version"], manifest["steps"], manifest["closed"]) == ("dualform", 2, 7, True)
    assert set(manifest) == {
        *("format", "version", "steps", "xxh3", "closed", "created", "versions", "layers", "parameters", "uncovered"),
        *("optimizers", "batch_axis", "columns", "files", "shards", "factory", "factory_arguments", "no_final", "rows"),
        "uncovered_state",
    }
    assert manifest["layers"]["0"] == {
        "kind": "Linear",
        "d_in": 5,
        "d_out": 4,
        "uses": [
            {"name": "weight", "parameter": "0.weight", "map": "outer"},
            {"name": "bias", "parameter": "0.bias", "map": "bias"},
        ],
        "store": "keys+values",
        "dtype": "float32",
        "optional": False,
    }
    assert manifest["parameters"]["0.weight"] == {"shape": [4, 5], "dtype": "float32"}
    assert manifest["columns"] == {"sample": "int64", "label": "int64", "task": "string", "mood": "double"}
    assert [(shard["index"], shard["start"], shard["stop"]) for shard in manifest["shards"]] == [
        (0, 0, 3),
        (1, 3, 6),
        (2, 6, 7),
    ]
    for shard in manifest["shards"]:
        assert set(shard) == {
            "index",
            "start",
            "stop",
            "files",
            "key_range",
            "parameters",
            "pools",
            "state_after",
            "stale",
        }
        assert set(shard["parameters"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
        assert shard["key_range"]["2"][0] == 0.0  # behind a ReLU
    for name in files(whole) - {"manifest.json"}:
        entries = manifest["files"] | {n: e for shard in manifest["shards"] for n, e in shard["files"].items()}
        assert entries[name] == {"bytes": (whole / name).stat().st_size, "xxh3": file_checksum(whole / name)}


def test_every_file_is_in_an_open_format(whole: Path) -> None:
    for name in files(whole):
        content = (whole / name).read_bytes()
        if name.endswith(".json"):
            json.loads(content, parse_constant=pytest.fail)
        elif name.endswith(".parquet"):
            assert content[:4] == content[-4:] == b"PAR1"
        else:
            (length,) = struct.unpack("<Q", content[:8])
            header = json.loads(content[8 : 8 + length])
            ends = [entry["data_offsets"][1] for entry in header.values()]
            assert max(ends) == len(content) - 8 - length, "a safetensors file is its header and its tensors"


@pytest.mark.parametrize(
    ("trained", "stored", "expected"),
    [
        ("float32", None, "float32"),
        ("float64", None, "float64"),
        ("float32", "float16", "float16"),
        ("float32", "int8", "int8"),
    ],
)
def test_keys_and_values_are_stored_in_the_dtype_that_was_asked_for(
    run: Path, trained: str, stored: Literal["float16", "int8"] | None, expected: str
) -> None:
    model = network(dtype=getattr(torch, trained))
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run, dtype=stored) as recorder:
        train(model, optimizer, range(2), recorder)
    tensors = safetensors.torch.load_file(run / "shards/000000.safetensors")
    names = {"0/keys", "0/values", "2/keys", "2/values"}
    scales = {f"{name}.scale" for name in names} if stored else set()
    assert set(tensors) == names | scales
    assert {tensors[name].dtype for name in names} == {getattr(torch, expected)}
    assert {tensors[name].dtype for name in scales} <= {torch.float32}
    assert tensors["0/keys"].shape == (12, 5)
    assert tensors["2/values"].shape == (12, 3)


def test_the_tables_have_these_columns(whole: Path) -> None:
    calls = pq.read_table(whole / "calls/000000.parquet")
    assert {name: str(kind) for name, kind in zip(calls.schema.names, calls.schema.types, strict=True)} == {
        "layer": "string",
        "step": "int64",
        "micro": "int32",
        "call": "int32",
        "rows": "int64",
        "positions": "int64",
        "inner": "int64",
        "offset": "int64",
        "annotation_offset": "int64",
        "annotation_rows": "int64",
        "annotation_positions": "int64",
        "layout": "string",
    }
    steps = pq.read_table(whole / "steps/000000.parquet")
    settings = {"lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize", "buffer"}
    own = {"step", "parameter", "optimizer", "updated", "factors", "fingerprint"}
    assert set(steps.column_names) == own | settings
    assert steps.num_rows == 3 * 4  # steps × parameters
    annotations = pq.read_table(whole / "annotations/000000.parquet")
    assert annotations.num_rows == 2 * 6  # step 2 was not annotated


# The manifest -----------------------------------------------------------------------------------------------------


def test_a_manifest_survives_its_own_text(whole: Path) -> None:
    manifest = Manifest.read(whole)
    assert Manifest.from_json(manifest.to_json(), path=whole) == manifest


OPTIONAL = {
    "checkpoints",
    "no_final",
    "rows",
    "shares",
    "training",
    "uncovered_state",
    "rank",
    "processes",
    "divided",
}  # entries that runs of earlier versions lack


def test_entries_that_earlier_versions_did_not_write_may_be_missing(whole: Path) -> None:
    raw = json.loads((whole / "manifest.json").read_text())
    older = Manifest.from_json(sealed({k: v for k, v in raw.items() if k not in OPTIONAL}), path=whole)
    assert older == dataclasses.replace(Manifest.read(whole), rows={}, uncovered_state=None)


def test_a_manifest_without_any_one_entry_is_refused(whole: Path) -> None:
    raw = json.loads((whole / "manifest.json").read_text())
    for name in [field.name for field in dataclasses.fields(Manifest) if field.name not in OPTIONAL]:
        with pytest.raises(FormatError, match=name):
            Manifest.from_json(sealed({k: v for k, v in raw.items() if k != name}), path=whole)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layers", []),
        ("layers", {"0": {"kind": "Linear"}}),
        ("shards", [{"index": 0}]),
        ("shards", "many"),
        ("files", {"initial.safetensors": {"bytes": 3}}),
        ("parameters", {"0.weight": 7}),
    ],
)
def test_a_mangled_entry_is_refused(whole: Path, name: str, value: object) -> None:
    raw = json.loads((whole / "manifest.json").read_text())
    with pytest.raises(FormatError, match="lacks or mangles"):
        Manifest.from_json(sealed(raw | {name: value}), path=whole)


def test_a_mangled_key_range_is_refused(whole: Path) -> None:
    raw = json.loads((whole / "manifest.json").read_text())
    raw["shards"][0]["key_range"]["0"] = [1.0]
    with pytest.raises(FormatError, match="lacks or mangles"):
        Manifest.from_json(sealed(raw), path=whole)


def test_json_of_something_else_is_no_run(whole: Path) -> None:
    for text in ("[]", "{}", '{"format": "other", "version": 1}', "3"):
        with pytest.raises(RunNotFoundError, match="does not describe a dualform run"):
            Manifest.from_json(text, path=whole)


# Publishing -------------------------------------------------------------------------------------------------------


def test_publish_makes_the_file_and_says_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.bin"
    entry = FolderBlobs(tmp_path).publish("deep/file.bin", lambda file: file.write(b"whole"))
    assert entry == FileEntry(5, file_checksum(path))
    assert path.read_bytes() == b"whole"
    assert files(tmp_path) == {"deep/file.bin"}


def test_a_failing_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(b"old")

    def fail(file: BinaryIO) -> None:
        file.write(b"half")
        (partial,) = {found.name for found in tmp_path.iterdir()} - {"file.bin"}
        assert partial.startswith(PARTIAL), "beside its place: another disk could not be renamed from"
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        FolderBlobs(tmp_path).publish("file.bin", fail)
    assert path.read_bytes() == b"old"
    assert files(tmp_path) == {"file.bin"}


def test_files_are_really_synced_here() -> None:
    with pytest.raises(ValueError, match="negative"):
        os.fsync(-1)


def test_a_file_is_synced_before_it_appears_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.bin"
    seen: list[tuple[bool, bool]] = []

    def fsync(handle: int) -> None:
        target = Path(f"/proc/self/fd/{handle}").resolve()
        seen.append((target.is_dir(), path.exists()))

    monkeypatch.setattr("dualform.store.folder_blobs.os.fsync", fsync)
    FolderBlobs(tmp_path).publish("file.bin", lambda file: file.write(b"whole"))
    assert seen == [(False, False), (True, True)]


def test_a_dtype_that_safetensors_cannot_hold_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"'x' is of torch\.complex128"):
        publish_tensors(FolderBlobs(tmp_path), "x.safetensors", {"x": torch.zeros(1, dtype=torch.complex128)})
    assert files(tmp_path) == set()


def test_parameters_that_are_views_of_one_storage_can_be_published(tmp_path: Path) -> None:
    flat = torch.arange(12.0)
    parts = {"a": flat[:6].view(2, 3), "b": flat[6:].view(3, 2).t(), "again": flat[:6].view(2, 3)}
    publish_tensors(FolderBlobs(tmp_path), "x.safetensors", parts)
    found = safetensors.torch.load_file(tmp_path / "x.safetensors")
    for name, part in parts.items():
        torch.testing.assert_close(found[name], part, rtol=0, atol=0)


def test_an_unreadable_safetensors_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(CorruptError, match=r"x\.safetensors"):
        TensorFile(file_blob(path))
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(CorruptError, match=r"x\.safetensors"):
        TensorFile(file_blob(path))


# The lock ---------------------------------------------------------------------------------------------------------


def test_the_lock_is_had_once_and_leaves_nothing(tmp_path: Path) -> None:
    with FolderBlobs(tmp_path).lease() as first:
        assert first
        with FolderBlobs(tmp_path).lease() as second:
            assert not second
        assert (tmp_path / LOCK).exists(), "who did not get the lock must not remove it"
    assert files(tmp_path) == set()
    with FolderBlobs(tmp_path).lease() as again:
        assert again


def test_the_end_of_a_lease_that_was_lost_leaves_the_lock_of_another(tmp_path: Path) -> None:
    lost = FolderBlobs(tmp_path).lease()
    assert lost.__enter__()
    (tmp_path / LOCK).unlink()
    with FolderBlobs(tmp_path).lease() as mine:
        assert mine
        lost.__exit__(None, None, None)
        assert (tmp_path / LOCK).exists()
    assert files(tmp_path) == set()


def test_a_lock_on_a_file_that_was_removed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    real = fcntl.flock

    def flock_late(file: int, how: int) -> None:
        (tmp_path / LOCK).unlink(missing_ok=True)  # its holder went away between our open and our flock
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock_late)
    with FolderBlobs(tmp_path).lease() as mine:
        assert not mine


def test_a_published_file_may_be_read_by_whom_new_files_may(tmp_path: Path) -> None:
    FolderBlobs(tmp_path).publish("file.bin", lambda file: file.write(b"whole"))
    (tmp_path / "plain").touch()
    assert (tmp_path / "file.bin").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.bin", "plain"]
