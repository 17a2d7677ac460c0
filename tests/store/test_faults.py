"""Bad input, one test each: one clear line, and nothing is lost when the fault is undone."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dualform
from dualform.attend.memory import Memory
from dualform.errors import (
    CorruptError,
    DualformError,
    FormatError,
    QueryError,
    RunExistsError,
    RunNotFoundError,
    SelectionError,
    StoreError,
    UnknownLayerError,
)
from helpers.manifests import write_manifest
from helpers.small import batch, files, listed, network, recorded, sgd, state, train


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    path = tmp_path_factory.mktemp("faults") / "run"
    return path, recorded(path, 7)


@pytest.fixture(name="model")
def trained_model(original: tuple[Path, nn.Module]) -> nn.Module:
    """The model that was trained."""
    return original[1]


@pytest.fixture
def whole(original: tuple[Path, nn.Module], tmp_path: Path) -> Iterator[Path]:
    """A copy of a closed run, to be broken; a test may restore it, and in the end it verifies."""
    path = tmp_path / "copy"
    shutil.copytree(original[0], path)
    yield path
    assert dualform.open(path).verify(original[1]).passed, "something was lost"
    assert files(path) - {n for n in files(path) if n.startswith("cache/")} == listed(path)


def line(caught: pytest.ExceptionInfo[DualformError]) -> str:
    """Return the message, which must be one line of reasonable length that ends like a sentence."""
    text = str(caught.value)
    assert "\n" not in text
    assert 20 < len(text) < 600
    assert text.endswith((".", ")"))
    return text


# The folder -------------------------------------------------------------------------------------------------------


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError) as caught:
        dualform.open(tmp_path / "nowhere")
    assert "nowhere is not a folder" in line(caught)
    assert isinstance(caught.value, FileNotFoundError)


def test_a_file_instead_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunNotFoundError) as caught:
        dualform.open(tmp_path / "file")
    assert "file is not a folder" in line(caught)


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError) as caught:
        dualform.open(tmp_path)
    assert "holds no manifest.json, so it is not a recorded run" in line(caught)


def test_a_manifest_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "an app"}')
    with pytest.raises(RunNotFoundError) as caught:
        dualform.open(tmp_path)
    assert "does not describe a dualform run" in line(caught)


def test_a_newer_format_version(whole: Path) -> None:
    manifest = whole / "manifest.json"
    before = manifest.read_text()
    write_manifest(whole, json.loads(before) | {"version": 6})
    with pytest.raises(FormatError) as caught:
        dualform.open(whole)
    assert "format version 6; this dualform reads versions 1 to 5" in line(caught)
    manifest.write_text(before)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"map": "inner"}, "is used by the map 'inner'; known are outer"),
        ({"name": "bias"}, "two of one name"),
        ({"keys": [0, 99]}, "does not lie within a key of width 5"),
        ({"values": [[0, 2]], "value_width": 3}, "does not lie within a value of width 4"),
        ({"rows": [3, 1]}, "is used in ranges that cannot be"),
        ({"keys": 3}, "lacks or mangles an entry"),
    ],
)
def test_a_use_of_a_parameter_that_cannot_be(whole: Path, change: dict[str, Any], expected: str) -> None:
    manifest = whole / "manifest.json"
    before = manifest.read_text()
    document = json.loads(before)
    document["layers"]["0"]["uses"][0] |= change
    write_manifest(whole, document)
    with pytest.raises(FormatError) as caught:
        dualform.open(whole)
    assert expected in line(caught)
    manifest.write_text(before)


@pytest.mark.parametrize("content", [b'{"format": "dualform", "ver', b"", b"\x80 no text at all"])
def test_a_mangled_manifest(whole: Path, content: bytes) -> None:
    manifest = whole / "manifest.json"
    before = manifest.read_bytes()
    manifest.write_bytes(content)
    with pytest.raises(FormatError) as caught:
        dualform.open(whole)
    assert "manifest.json is not JSON" in line(caught)
    model = network()
    with pytest.raises(FormatError), dualform.record(model, sgd(model), whole, resume=True):
        pytest.fail("a run whose manifest cannot be read must not be resumed")
    manifest.write_bytes(before)


# Its files --------------------------------------------------------------------------------------------------------

KINDS = (
    "shards/000001.safetensors",
    "calls/000001.parquet",
    "annotations/000001.parquet",
    "steps/000001.parquet",
    "initial.safetensors",
    "final.safetensors",
)


@pytest.mark.parametrize("name", KINDS)
def test_a_truncated_file(whole: Path, name: str) -> None:
    content = (whole / name).read_bytes()
    (whole / name).write_bytes(content[:-7])
    with pytest.raises(CorruptError) as caught:
        dualform.open(whole)
    assert f"{name} has {len(content) - 7} bytes, but {len(content)} were published" in line(caught)
    (whole / name).write_bytes(content)


@pytest.mark.parametrize("name", KINDS)
def test_a_missing_file(whole: Path, name: str) -> None:
    aside = (whole / name).rename(whole.parent / "aside")
    with pytest.raises(CorruptError) as caught:
        dualform.open(whole)
    assert f"{name} is listed in the manifest but missing" in line(caught)
    aside.rename(whole / name)


@pytest.mark.parametrize("place", ["head", "middle", "end"])
@pytest.mark.parametrize("name", KINDS)
def test_a_flipped_byte_is_found_by_verify(whole: Path, model: nn.Module, name: str, place: str) -> None:
    content = bytearray((whole / name).read_bytes())
    at = {"head": 9, "middle": len(content) // 2, "end": len(content) - 1}[place]
    content[at] ^= 0x10
    (whole / name).write_bytes(content)
    memory = dualform.open(whole)  # sizes agree
    with pytest.raises(CorruptError) as caught:
        memory.verify(model)
    assert name in line(caught)
    assert "its content was changed" in line(caught)
    content[at] ^= 0x10
    (whole / name).write_bytes(content)


@pytest.mark.parametrize("name", KINDS[:1] + KINDS[4:])
def test_an_unreadable_tensor_file_is_an_error_and_never_zeros(whole: Path, name: str) -> None:
    content = bytearray((whole / name).read_bytes())
    content[0] ^= 0xFF  # the length of the header
    (whole / name).write_bytes(content)
    memory = dualform.open(whole)
    with pytest.raises(CorruptError) as caught:
        memory.verify() if name == "final.safetensors" else memory.weights()
    assert name in line(caught)
    content[0] ^= 0xFF
    (whole / name).write_bytes(content)


@pytest.mark.parametrize("name", KINDS[1:4])
def test_an_unreadable_table_is_an_error_and_never_empty(whole: Path, name: str) -> None:
    content = (whole / name).read_bytes()
    (whole / name).write_bytes(b"\0" * len(content))
    memory = dualform.open(whole)
    with pytest.raises(CorruptError) as caught:
        memory.where(label=1).unwarned().weights()
    assert f"{name} cannot be read" in line(caught)
    (whole / name).write_bytes(content)


def test_a_shard_without_a_layer_that_it_should_hold(whole: Path) -> None:
    aside = (whole / "shards/000001.safetensors").read_bytes()
    header_end = 8 + int.from_bytes(aside[:8], "little")
    renamed = aside[:header_end].replace(b'"2/keys"', b'"9/keys"') + aside[header_end:]
    (whole / "shards/000001.safetensors").write_bytes(renamed)
    with pytest.raises(CorruptError) as caught:
        dualform.open(whole).weights()
    assert "does not hold '2/keys'" in line(caught)
    (whole / "shards/000001.safetensors").write_bytes(aside)


@pytest.mark.parametrize("name", KINDS[:4])
def test_a_file_that_goes_away_while_the_run_is_open(whole: Path, model: nn.Module, name: str) -> None:
    memory = dualform.open(whole)
    aside = (whole / name).rename(whole.parent / "aside")
    for question in (lambda: memory.where(label=1).unwarned().weights(), lambda: memory.verify(model)):
        with pytest.raises(CorruptError) as caught:
            question()
        assert name in line(caught)
    aside.rename(whole / name)


# Questions --------------------------------------------------------------------------------------------------------


def test_an_unknown_layer(whole: Path, model: nn.Module) -> None:
    memory = dualform.open(whole)
    inputs = batch(0)[0]
    for question in (
        lambda: memory.patterns("1"),
        lambda: memory.attend(model, inputs, layers=["1"]),
        lambda: memory.attend(queries={"1": inputs}),
        lambda: memory.attend(model, inputs)["1"],
        lambda: memory.apply(model, layers=["1"]),
    ):
        with pytest.raises(UnknownLayerError) as caught:
            question()
        assert "'1'" in line(caught)
        assert "'0', '2'" in line(caught), "the error says which there are"


def test_an_unknown_column(whole: Path, model: nn.Module) -> None:
    memory = dualform.open(whole)
    layer = memory.attend(model, batch(0)[0])["0"]
    for question in (
        lambda: memory.where(colour=1),
        lambda: memory.without(colour=1),
        lambda: memory.where("colour = 1"),
        lambda: memory.patterns("0", columns=["step", "colour"]),
        lambda: layer.totals(by="colour"),
        lambda: layer.totals(by=["label", "colour"]),
        lambda: layer.totals(by=dualform.bins("colour", width=1)),
        lambda: layer.top(1, by="colour"),
    ):
        with pytest.raises(SelectionError) as caught:
            question()
        assert "colour" in line(caught)
        assert "pattern, step, micro, call, row, position, sample, label, task, mood" in line(caught)


@pytest.mark.parametrize(
    "sql",
    [
        "step >=",
        "step >= 3)",
        "((step",
        "",
        "step = 'x' 'y'",
        "true; drop table patterns",
        "count(*) > 3",
        "select 1 from",
    ],
)
def test_malformed_sql(whole: Path, sql: str) -> None:
    with pytest.raises(SelectionError) as caught:
        dualform.open(whole).where(sql)
    assert f"The condition {sql!r} cannot be evaluated" in line(caught)


@pytest.mark.parametrize(
    "sql",
    [
        "step in (select 1 from read_csv('{file}'))",
        "exists (select * from '{file}')",
        "exists (from read_text('{file}'))",
        "exists (from read_blob('{file}'))",
        "exists (from glob('{file}'))",
        "exists (from parquet_scan('{file}'))",
        "exists (from read_json_auto('{file}'))",
        "getenv('HOME') is null",
    ],
)
def test_sql_that_reaches_for_files(whole: Path, tmp_path: Path, sql: str) -> None:
    secret = tmp_path / "secret.csv"
    secret.write_text("a\n1\n")
    with pytest.raises(SelectionError) as caught:
        dualform.open(whole).where(sql.format(file=secret))
    assert "cannot be evaluated" in line(caught)


def test_sql_cannot_change_the_settings_that_hold_it(whole: Path) -> None:
    for sql in ("set enable_external_access = true", "true); set enable_external_access = true; select (true"):
        with pytest.raises(SelectionError):
            dualform.open(whole).where(sql)
    with pytest.raises(SelectionError):
        dualform.open(whole).where("exists (from read_text('/etc/hostname'))")


def test_sql_that_fails_only_in_a_later_shard(whole: Path) -> None:
    view = dualform.open(whole).where("cast(case when step >= 6 then 'late' else '1' end as int) = 1")
    with pytest.raises(SelectionError) as caught:
        view.weights()
    assert "late" in line(caught)


def test_columns_that_sql_cannot_tell_apart(run: Path) -> None:
    model = network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        recorder.annotate(Step=7)
        train(model, optimizer, [2], recorder)
        recorder.annotate(Step=8)
        train(model, optimizer, [5], recorder)
    memory = dualform.open(run)
    with pytest.raises(SelectionError) as caught:
        memory.where("Step = 8")
    assert "'step', 'Step' apart" in line(caught)
    assert memory.where(Step=8).patterns("0")["step"].to_pylist() == [1] * 6
    assert memory.where(step=0).patterns("0")["Step"].to_pylist() == [7] * 6


def test_a_value_that_a_column_cannot_hold(whole: Path) -> None:
    memory = dualform.open(whole)
    for wrong in ("three", [1, "three"], 1.5, object()):
        with pytest.raises(SelectionError) as caught:
            memory.where(label=wrong).weights()
        assert "'label' holds int64, which cannot equal" in line(caught)


def test_nothing_to_select_or_group_by(whole: Path, model: nn.Module) -> None:
    memory = dualform.open(whole)
    for question in (
        lambda: memory.where(),
        lambda: memory.without(),
        lambda: memory.attend(model, batch(0)[0])["0"].totals(by=[]),
    ):
        with pytest.raises(SelectionError, match=r"Nothing to (select|group) by"):
            question()


def test_bins_of_strings_or_of_no_width(whole: Path, model: nn.Module) -> None:
    with pytest.raises(SelectionError, match="expected a positive number"):
        dualform.bins("step", width=0)
    layer = dualform.open(whole).attend(model, batch(0)[0])["0"]
    with pytest.raises(SelectionError, match="'task' holds string; only numbers can be cut into bins"):
        layer.totals(by=dualform.bins("task", width=2))


@pytest.mark.parametrize("step", [-1, 8])
def test_a_step_outside_the_memory(whole: Path, step: int) -> None:
    with pytest.raises(SelectionError) as caught:
        dualform.open(whole).at(step=step)
    assert f"Step {step} is outside the memory, which has steps 0 to 7" in line(caught)


def test_an_empty_memory_and_an_empty_view(whole: Path, model: nn.Module, run: Path) -> None:
    fresh = network()
    with dualform.record(fresh, sgd(fresh), run):
        pass
    for memory in (dualform.open(run), dualform.open(whole).where("step > 99"), dualform.open(whole).at(step=0)):
        layer = memory.attend(model, batch(0)[0], other_model=True)["0"]
        for question in (
            layer.attention,
            layer.contributions,
            lambda layer=layer: layer.totals(by="step"),
            lambda layer=layer: layer.totals(by="step", of="contribution"),
            lambda layer=layer: layer.top(1),
            lambda layer=layer: layer.top(1, by="step"),
        ):
            with pytest.raises(QueryError) as caught:
                question()
            assert "holds no patterns" in line(caught)
        assert layer.output().shape == (6, 4), "what the start gives is known all the same"


def test_no_queries(whole: Path, model: nn.Module) -> None:
    memory = dualform.open(whole)
    for question in (
        lambda: memory.attend(model, torch.zeros(0, 5)),
        lambda: memory.attend(queries={"0": torch.zeros(0, 5)}),
        lambda: memory.attend(queries={"0": torch.zeros(3, 0, 5)}),
    ):
        with pytest.raises(QueryError) as caught:
            question()
        assert "There are no queries for layer '0'" in line(caught)
    with pytest.raises(QueryError, match="empty iterable"):
        memory.attend(model, [])
    with pytest.raises(QueryError, match="either a model and inputs, or queries"):
        memory.attend(model)


def test_queries_of_the_wrong_width(whole: Path) -> None:
    memory = dualform.open(whole)
    for wrong in (torch.zeros(2, 4), torch.zeros(5, 2), torch.zeros(0, 0), torch.tensor(1.0)):
        with pytest.raises(QueryError) as caught:
            memory.attend(queries={"0": wrong})
        assert "expected a tensor (..., 5)" in line(caught)
        assert str(tuple(wrong.shape)) in line(caught)
    with pytest.raises(QueryError, match="no queries for the layers '2'"):
        memory.attend(queries={"0": torch.zeros(1, 5)}, layers=["0", "2"])


def test_a_model_that_is_another(whole: Path) -> None:
    memory = dualform.open(whole)
    with pytest.raises(QueryError, match=r"Linear layer '0', but in this model it is a ReLU"):
        memory.attend(nn.Sequential(nn.ReLU(), nn.Identity(), nn.Linear(4, 3)), batch(0)[0])
    with pytest.raises(QueryError, match=r"Layer '0' of this model maps \(5, 7\); the memory's maps \(5, 4\)"):
        memory.attend(nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)), batch(0)[0])
    with pytest.raises(QueryError, match=r"'2.bias' is \(3,\) in the memory, but missing in this model"):
        memory.apply(nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3, bias=False)))


# Recording --------------------------------------------------------------------------------------------------------


def attempt(path: Path, **options: Any) -> None:
    model = network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path, **options) as recorder:
        train(model, optimizer, range(2), recorder)


def test_recording_into_an_existing_run(whole: Path) -> None:
    before = {name: (whole / name).read_bytes() for name in files(whole)}
    with pytest.raises(RunExistsError) as caught:
        attempt(whole)
    assert "holds a recorded run already. Pass resume=True" in line(caught)
    assert {name: (whole / name).read_bytes() for name in files(whole)} == before


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("name", ["thesis.tex", "initial.safetensors", ".partial-draft"])
def test_recording_into_a_folder_with_other_things(run: Path, name: str, resume: bool) -> None:
    run.mkdir()
    (run / name).write_text("years of work")
    with pytest.raises(RunExistsError) as caught:
        attempt(run, resume=resume)
    assert "is not empty and holds no run" in line(caught)
    assert files(run) == {name}
    assert (run / name).read_text() == "years of work"


def test_what_a_kill_at_the_very_start_leaves_is_no_obstacle(run: Path) -> None:
    run.mkdir()
    for name in (".lock", ".partial-1234-initial.safetensors", ".partial-5678-manifest.json", "initial.safetensors"):
        (run / name).write_text("half")
    (run / ".partial-9abc").mkdir()
    (run / ".partial-9abc" / ".tmp4b95Np").write_text("a library's own")
    attempt(run, resume=True)
    assert dualform.open(run).verify().passed
    assert files(run) == listed(run)


def test_recording_into_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(StoreError) as caught:
        attempt(tmp_path / "file")
    assert "file cannot be written" in line(caught)


@pytest.mark.parametrize("resume", [False, True])
def test_two_recorders_on_one_folder(run: Path, resume: bool) -> None:
    model = network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run, shard_bytes=0) as recorder:
        train(model, optimizer, range(2), recorder)
        with pytest.raises(RunExistsError) as caught:
            attempt(run, resume=resume)
        assert "is still being recorded to by this process" in line(caught)
        train(model, optimizer, range(2, 4), recorder)
    assert dualform.open(run).step == 4
    assert dualform.open(run).verify(model).passed


def test_more_planned_steps_than_the_disk_holds(run: Path) -> None:
    with pytest.raises(StoreError) as caught, pytest.warns(UserWarning, match="closed properly"):
        attempt(run, steps=10**13)
    text = line(caught)
    assert "10000000000000 steps will take" in text
    assert "B free" in text
    assert dualform.open(run).verify().passed, "an empty memory"


def test_less_free_space_than_a_shard(run: Path) -> None:
    with pytest.raises(StoreError, match="one shard will take"), pytest.warns(UserWarning, match="closed properly"):
        attempt(run, shard_bytes=10**16)


def test_a_full_disk_before_anything_is_written(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("dualform.store.tensors.write_tensors", full)
        with pytest.raises(StoreError) as caught:
            attempt(run)
    assert "No space left on device" in line(caught)
    assert files(run) == set()
    attempt(run)
    assert dualform.open(run).verify().passed


@pytest.mark.parametrize("what", ["dualform.store.shard_writing.write_parts", "pyarrow.parquet.write_table"])
def test_a_full_disk_in_the_middle(run: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """The file that does not fit is half written; then there is room again and the run is resumed."""
    model = network()
    optimizer = sgd(model)

    def full(*args: Any, **_: Any) -> None:
        next(found for found in args if hasattr(found, "write")).write(b"half")
        raise OSError(28, "No space left on device")

    states: list[dict[str, torch.Tensor]] = []

    def record() -> None:
        with dualform.record(model, optimizer, run, shard_bytes=1000) as recorder:
            states.extend(train(model, optimizer, range(4), recorder))
            recorder.flush()
            patch.setattr(what, full)
            states.extend(train(model, optimizer, range(4, 8), recorder))
            recorder.flush()

    with monkeypatch.context() as patch:
        with pytest.warns(UserWarning, match="closed properly"), pytest.raises(StoreError) as caught:
            record()
        text = line(caught)
        assert "No space left on device" in text
        assert "What was published before stays readable" in text
    memory = dualform.open(run)
    assert memory.step == 4
    assert memory.verify(states[3]).passed
    assert not [name for name in files(run) if ".partial-" in name or name == ".lock"]
    resume_from(run, states, memory.step)


def resume_from(path: Path, states: list[dict[str, torch.Tensor]], step: int) -> None:
    """Continue a broken run from the state after `step` steps; the result is whole."""
    model = network()
    model.load_state_dict(states[step - 1])
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path, resume=True, shard_bytes=1000) as recorder:
        assert recorder.step == step
        train(model, optimizer, range(step, step + 2), recorder)
    assert dualform.open(path).step == step + 2
    assert dualform.open(path).verify(model).passed
    assert files(path) == listed(path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 300 kB."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(path)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs the right to mount a tmpfs: {error}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)  # memory maps may still be open


@pytest.mark.parametrize("on_failure", ["raise", "detach"])
def test_a_disk_that_is_really_full(small_disk: Path, on_failure: Any) -> None:
    path = small_disk / "run"
    model = network()
    optimizer = sgd(model)
    states: list[dict[str, torch.Tensor]] = []
    recorder = dualform.record(model, optimizer, path, shard_bytes=3000, on_failure=on_failure)

    def fill() -> None:
        with recorder:
            for step in range(400):
                states.extend(train(model, optimizer, [step], recorder))
                if step % 10 == 0:
                    recorder.flush()

    if on_failure == "raise":
        with pytest.warns(UserWarning, match="closed properly"), pytest.raises(StoreError) as caught:
            fill()
        assert "No space left on device" in line(caught)
    else:
        with pytest.warns(UserWarning, match=r"Recording stopped .* No space left on device"):
            fill()
        assert len(states) == 400
    memory = dualform.open(path)
    assert 10 < memory.step < len(states) + 1
    assert memory.verify(states[memory.step - 1]).passed
    layer = memory.attend(model, batch(0)[0], other_model=True)["0"]
    assert layer.totals(by="label").values.shape == (6, 4), "the cache cannot be written, and need not be"
    assert not [name for name in files(path) if ".partial-" in name or name == ".lock"]
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    resume_from(path, states, memory.step)


def test_options_that_do_not_exist(run: Path) -> None:
    model = network()
    with pytest.raises(ValueError, match=r"dtype is 'float8'"):
        dualform.record(model, sgd(model), run, dtype="float8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"on_failure is 'ignore'"):
        dualform.record(model, sgd(model), run, on_failure="ignore")  # type: ignore[arg-type]
    assert not run.exists()


# Test examples ----------------------------------------------------------------------------------------------------


def test_examples_beside_the_patterns(whole: Path) -> None:
    memory = dualform.open(whole)
    with pytest.raises(QueryError, match="keeps no test examples"):
        memory.tests()
    with pytest.raises(QueryError, match="There are 6 test inputs, but 5 targets"):
        memory.add_tests(batch(0)[0], batch(0)[1][:5])
    memory.add_tests(*batch(0))
    again: Memory = dualform.open(whole)
    torch.testing.assert_close(again.tests()[0], batch(0)[0], rtol=0, atol=0)
    assert again.verify().files == 15


def test_examples_are_not_added_while_somebody_records(run: Path) -> None:
    model = network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        train(model, optimizer, range(2), recorder)
        recorder.flush()
        with pytest.raises(RunExistsError) as caught:
            dualform.open(run).add_tests(*batch(0))
        assert "is being recorded to" in line(caught)
        train(model, optimizer, range(2, 3), recorder)
    assert dualform.open(run).step == 3
    dualform.open(run).add_tests(batch(0)[0])
    memory = dualform.open(run)
    assert memory.tests()[1] is None
    assert memory.info().closed
    assert memory.verify(model).passed
    fresh = network()
    fresh.load_state_dict(state(model))
    with dualform.record(fresh, sgd(fresh), run, resume=True):
        pass
    assert dualform.open(run).tests()[0].shape == (6, 5), "a resumed run keeps them"
