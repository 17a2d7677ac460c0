"""Files that were changed and whose checksums were forged: refused by name, before memory is taken for them."""

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

import dualform
from dualform.attend.memory import Memory
from dualform.engine.facts_check import facts_problem
from dualform.errors import CorruptError
from dualform.store.checked_tables import read_checked_table
from dualform.store.manifest import Manifest
from dualform.store.parquet_footer import read_footer
from dualform.store.reader import Run
from dualform.store.tensors import TensorFile
from helpers.blob_files import file_blob
from helpers.forged_tables import Edit, cell, edit_table, sign
from helpers.manifests import write_manifest
from helpers.small import recorded

WIDE = 40  # keys that are wide enough for a pool


class Mixed(nn.Module):
    """A table, and a layer that sees the same samples in every epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 3)
        self.first = nn.Linear(WIDE, 3)

    def forward(self, inputs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.first(inputs) + self.table(tokens)
        return found


def record_mixed(path: Path, optimizer: str) -> None:
    torch.manual_seed(0)
    model = Mixed()
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)
    inputs, tokens, labels = torch.randn(8, WIDE), torch.arange(8) % 6, torch.arange(8) % 3
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    made.step()  # so that the run keeps the state that it begins with
    with dualform.record(model, made, path, shard_bytes=1) as recorder:
        for step in range(4):
            rows = slice(4 * (step % 2), 4 * (step % 2) + 4)
            recorder.annotate(label=labels[rows], task="t")
            made.zero_grad()
            functional.cross_entropy(model(inputs[rows], tokens[rows]), labels[rows]).backward()
            made.step()


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("forged")
    recorded(folder / "plain", 7)
    recorded(folder / "int8", 7, dtype="int8")
    record_mixed(folder / "mixed", "SGD")
    record_mixed(folder / "adam", "Adam")
    return {name: folder / name for name in ("plain", "int8", "mixed", "adam")}


@pytest.fixture
def run(originals: dict[str, Path], tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of a good run, to be forged: the plain one, or the one that a test names."""
    path = tmp_path / "copy"
    shutil.copytree(originals[getattr(request, "param", "plain")], path)
    return path


def ask(memory: Memory) -> None:
    """Ask everything that reads a run's tables and patterns."""
    memory.info()
    for layer in memory.layers:
        memory.patterns(layer)
    memory.where(label=1).unwarned().weights()
    memory.verify()


def test_the_good_runs_answer(originals: dict[str, Path]) -> None:
    for path in originals.values():
        ask(dualform.open(path))
        assert dualform.open(path).verify().passed


# Calls ------------------------------------------------------------------------------------------------------------

CALLS: dict[str, tuple[Edit, str]] = {
    "fewer rows than are there": (cell("rows", 0, 5), "do not lie one behind the other"),
    "rows that are not there": (cell("rows", -1, 7), "the calls say"),
    "rows for gigabytes": (cell("rows", -1, 2**39), "the calls say"),
    "rows that overflow": (cell("rows", 0, 2**62), "a call has rows"),
    "positions that overflow with them": (cell("positions", 0, 2**40), "more than .* patterns"),
    "negative rows": (cell("rows", 0, -1), "a call has rows -1"),
    "positions of no inner ones": (cell("inner", 0, 0), "no multiple of its inner"),
    "another offset": (cell("offset", 1, 1), "do not lie one behind the other"),
    "a negative micro": (cell("micro", 0, -1), "a call has micro -1"),
    "a step before the first": (cell("step", 0, 2), "do not ascend from 3"),
    "steps that go back": (cell("step", -1, 3), "do not ascend"),
    "an unknown layer": (cell("layer", 0, "x"), "calls of 'x'"),
    "no layer": (cell("layer", 0, None), "no value in a column that needs one"),
    "no rows": (cell("rows", 0, None), "no value in a column that needs one"),
    "annotations behind the last": (cell("annotation_offset", 0, 7), "annotations behind the last"),
    "annotations before the first": (cell("annotation_offset", 0, -1), "annotations before the first"),
    "annotations for gigabytes": (cell("annotation_positions", 0, 2**40), "annotations behind the last"),
    "fewer annotations than rows": (cell("annotation_rows", 0, 2), "more rows or positions than its annotations"),
    "half an address": (cell("annotation_rows", 0, None), "half an address"),
    "a layout that takes gigabytes": (cell("layout", 0, "6,4:9999999999,1"), "is no layout"),
    "a layout of other errors": (cell("layout", 0, "6,5:1,6"), "is no layout"),
    "a layout that is none": (cell("layout", 0, "x"), "is no layout"),
    "a call less": (lambda table: table.slice(0, table.num_rows - 1), "the calls say"),
    "no calls": (lambda table: table.slice(0, 0), "belongs to no call"),
    "all calls twice": (lambda table: pa.concat_tables([table, table]), "do not ascend"),
    "a column less": (lambda table: table.drop_columns(["inner"]), "its columns are"),
    "a column more": (lambda table: table.append_column("x", pa.nulls(table.num_rows)), "its columns are"),
    "a column of another type": (
        lambda table: table.set_column(4, "rows", table["rows"].cast(pa.int32())),
        "its columns are",
    ),
}


@pytest.mark.parametrize("what", CALLS)
def test_calls_are_refused_with(what: str, run: Path) -> None:
    edit, match = CALLS[what]
    edit_table(run, "calls/000001.parquet", edit)
    with pytest.raises(CorruptError, match=match):
        ask(dualform.open(run))


def test_a_call_of_a_backward_that_was_not_is_refused(run: Path) -> None:
    edit_table(run, "calls/000001.parquet", cell("micro", -1, 2**20))
    with pytest.raises(CorruptError, match="no step had more than 1"):
        dualform.open(run).weights()


# Steps ------------------------------------------------------------------------------------------------------------

STEPS: dict[str, tuple[Edit, str]] = {
    "an unknown parameter": (cell("parameter", 0, "x"), "steps of 'x'"),
    "an unknown optimizer": (cell("optimizer", 0, "Adam"), "the optimizer 'Adam'"),
    "a step before the first": (cell("step", 0, 0), "do not ascend from 3"),
    "a fact without a step": (cell("step", 0, None), "no value in a column"),
    "a fact without factors": (cell("factors", 0, None), "no value in a column"),
    "a factor that is none": (cell("factors", 0, [None]), "a factor has no value"),
    "a step without its rate": (cell("lr", 0, None), "'lr' is not finite"),
    "a rate that is not finite": (cell("lr", 0, float("inf")), "'lr' is not finite"),
    "a rate that float32 does not hold": (cell("lr", 0, 1e300), "larger than 1e\\+30"),
    "a setting that is gone": (lambda table: table.drop_columns(["momentum"]), "momentum"),
    "all facts twice": (lambda table: pa.concat_tables([table, table]), "do not ascend"),
    "a fact twice": (lambda table: pa.concat_tables([table.slice(0, 1), table]), "its steps do not ascend"),
    "a setting that is a list": (
        lambda table: table.append_column("x", pa.array([[1]] * table.num_rows)),
        "its columns are",
    ),
    "a setting of another type": (
        lambda table: table.set_column(table.column_names.index("lr"), "lr", table["lr"].cast(pa.string())),
        "Restore the run's files",
    ),
}


@pytest.mark.parametrize("what", STEPS)
def test_steps_are_refused_with(what: str, run: Path) -> None:
    edit, match = STEPS[what]
    edit_table(run, "steps/000001.parquet", edit)
    with pytest.raises(CorruptError, match=match):
        ask(dualform.open(run))


@pytest.mark.parametrize("run", ["adam"], indirect=True)
@pytest.mark.parametrize(("setting", "value"), [("beta1", 1.0), ("beta2", 1.5), ("beta1", -0.1), ("eps", -1.0)])
def test_settings_that_no_step_has_are_refused(setting: str, value: float, run: Path) -> None:
    edit_table(run, "steps/000001.parquet", cell(setting, 0, value))
    with pytest.raises(CorruptError, match=setting):
        dualform.open(run).weights()


@pytest.mark.parametrize("run", ["adam"], indirect=True)
def test_a_setting_that_needs_state_cannot_be_turned_on_later(run: Path) -> None:
    edit_table(run, "steps/000002.parquet", cell("amsgrad", 0, True))
    with pytest.raises(CorruptError, match="turned on after the first step"):
        dualform.open(run).weights()


def test_of_an_unknown_optimizer_nothing_is_expected() -> None:
    assert facts_problem("Lion", np.array([0, 1]), {"lr": np.array([np.nan, 0.1])}) == ""
    assert "ascend" in facts_problem("Lion", np.array([1, 1]), {})


def test_a_run_of_steps_of_which_nothing_is_recorded_is_refused(run: Path) -> None:
    raw = json.loads((run / "manifest.json").read_text())
    raw["steps"] = raw["shards"][-1]["stop"] = 10**9
    write_manifest(run, raw)
    with pytest.raises(CorruptError, match="4 facts, for 999999994 steps"):
        dualform.open(run).weights()


def test_factors_that_would_take_gigabytes_are_refused(run: Path) -> None:
    edit_table(run, "steps/000002.parquet", cell("factors", 0, [1.0] * 1_000_000))
    raw = json.loads((run / "manifest.json").read_text())
    raw["steps"] = raw["shards"][-1]["stop"] = 100_000  # a matrix of steps × factors takes 800 GB
    write_manifest(run, raw)
    with pytest.raises(CorruptError, match="one step has 1000000 factors"):
        dualform.open(run).weights()


# Annotations ------------------------------------------------------------------------------------------------------


def test_a_column_that_the_manifest_does_not_list_is_refused(run: Path) -> None:
    raw = json.loads((run / "manifest.json").read_text())
    del raw["columns"]["label"]
    write_manifest(run, raw)
    with pytest.raises(CorruptError, match="'label' holds int64, but the manifest says nothing"):
        dualform.open(run).patterns("0", columns=["sample"])


def test_a_column_of_another_type_is_refused(run: Path) -> None:
    edit_table(
        run,
        "annotations/000000.parquet",
        lambda table: table.set_column(table.column_names.index("label"), "label", table["label"].cast(pa.string())),
    )
    with pytest.raises(CorruptError, match="'label' holds string, but the manifest says int64"):
        dualform.open(run).patterns("0")


def test_whole_numbers_beyond_floating_point_are_rounded(run: Path) -> None:
    raw = json.loads((run / "manifest.json").read_text())
    raw["columns"]["label"] = "double"
    write_manifest(run, raw)
    edit_table(run, "annotations/000000.parquet", cell("label", 0, 2**60 + 1))
    assert dualform.open(run).patterns("0")["label"][0].as_py() == 2.0**60


def test_a_text_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"task": pa.array([b"\xff\xfe"]).cast(pa.string(), safe=False)}), path)
    with pytest.raises(CorruptError, match=r"x.parquet cannot be read: .*UTF8"):
        read_checked_table(file_blob(path), lambda _: "", budget=1 << 20)


# Bombs ------------------------------------------------------------------------------------------------------------


def bomb_of_rows(path: Path, codec: str) -> None:
    part = pa.table({"label": pa.array(np.zeros(1_000_000, dtype=np.int64))})
    with pq.ParquetWriter(path, part.schema, compression=codec) as writer:
        for _ in range(20):
            writer.write_table(part)


def bomb_of_texts(path: Path) -> None:
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 100_000, pa.int32()), pa.array(["x" * 500_000]))
    pq.write_table(pa.table({"task": text}), path, store_schema=False, dictionary_pagesize_limit=1 << 30)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def test_a_small_file_of_many_rows_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    bomb_of_rows(path, "snappy")
    assert path.stat().st_size < 100_000
    before = peak()
    with pytest.raises(CorruptError, match="20000000 rows would take 152 MB"):
        read_checked_table(file_blob(path), lambda _: "", budget=64 << 20)
    assert peak() - before < 50 << 20


def test_a_small_file_of_long_texts_is_refused_before_they_are_spelled_out(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    bomb_of_texts(path)
    assert path.stat().st_size < 1_000_000
    before = peak()
    with pytest.raises(CorruptError, match="texts of column 'task' would take 47683 MB"):
        read_checked_table(file_blob(path), lambda _: "", budget=64 << 20)
    assert peak() - before < 100 << 20


@pytest.mark.parametrize("codec", ["zstd", "gzip", "brotli", "lz4"])
def test_a_codec_that_shrinks_without_bounds_is_refused(tmp_path: Path, codec: str) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"label": [1]}), path, compression=codec)
    with pytest.raises(CorruptError, match="a column is compressed by"):
        read_checked_table(file_blob(path), lambda _: "", budget=1 << 20)


FLIP_BITS = """
import sys
from pathlib import Path
from dualform.errors import CorruptError
from dualform.store.blobs import Blob
from dualform.store.checked_tables import read_checked_table
from dualform.store.folder_blobs import FolderBlobs

path = Path(sys.argv[1])
blob = Blob(FolderBlobs(path.parent), path.name)
whole, read = path.read_bytes(), 0
for at in range(len(whole) - 8 - int.from_bytes(whole[-8:-4], "little"), len(whole)):
    for bit in (0, 4, 6):
        content = bytearray(whole)
        content[at] ^= 1 << bit
        path.write_bytes(content)
        try:
            read += read_checked_table(blob, lambda _: "", budget=1 << 20).num_rows >= 0
        except CorruptError:
            pass
print(read)
"""


def test_no_flipped_bit_of_a_footer_ends_the_process(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"n": [1, 2], "task": ["a", None]}), path)
    done = subprocess.run([sys.executable, "-c", FLIP_BITS, path], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


def test_a_footer_is_read_as_pyarrow_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    lists = pa.array([[1.0], [], [2.0, 3.0]] * 50)
    pq.write_table(pa.table({"n": list(range(150)), "factors": lists}), path, row_group_size=60)
    rows, parts = read_footer(file_blob(path))
    footer = pq.read_metadata(path)
    columns = [footer.row_group(i).column(j) for i in range(3) for j in range(2)]
    assert rows == 150
    assert [part.rows for part in parts] == [60, 60, 60, 60, 30, 30]
    assert [part.values for part in parts] == [column.num_values for column in columns]
    assert {part.codec for part in parts} == {1}
    assert [part.nested for part in parts] == [False, True] * 3
    pq.write_table(pa.table({"n": [1]}), path, compression="none")
    assert [part.codec for part in read_footer(file_blob(path))[1]] == [0]


@pytest.mark.parametrize(
    "content", [b"", b"PAR1", b"PAR1" * 9, b"\xff" * 99 + b"\x20\0\0\0PAR1", b"\x1c" * 99 + b"\x50\0\0\0PAR1"]
)
def test_a_footer_that_is_none_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(content)
    with pytest.raises(CorruptError, match="cannot be read"):
        read_checked_table(file_blob(path), lambda _: "", budget=1 << 20)


def test_texts_of_an_honest_table_are_read_whichever_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.parquet"
    table = pa.table({"task": ["a", None, "b", "a"] * 100, "n": list(range(400))})
    pq.write_table(table, path, row_group_size=150)
    assert read_checked_table(file_blob(path), lambda _: "", budget=1 << 20).equals(table)
    monkeypatch.setattr("dualform.store.checked_tables.MIN_BUDGET", 0)  # so that texts are read as a dictionary
    assert read_checked_table(file_blob(path), lambda _: "", budget=1 << 20).equals(table)
    assert read_checked_table(file_blob(path), lambda _: "", budget=1 << 20, columns=["task"]).equals(
        table.select(["task"])
    )


# Patterns ---------------------------------------------------------------------------------------------------------


def edit_tensors(folder: Path, name: str, edit: Callable[[dict[str, Any], bytearray], object]) -> None:
    """Edit the header and the numbers of a safetensors file, and sign it."""
    path = folder / name
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), bytearray(content[8 + length :])
    edit(header, data)
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + data)
    sign(folder, name)


@pytest.mark.parametrize(
    ("forge", "problem"),
    [
        (lambda tensors: tensors.update({"2/keys": tensors["2/keys"].float()}), "is .* of torch.float32"),
        (lambda tensors: tensors.update({"2/keys": tensors["2/keys"].long()}), "is .* of torch.int64"),
        (lambda tensors: tensors.pop("2/keys.scale"), "does not hold '2/keys.scale'"),
        (lambda tensors: tensors.update({"2/keys.scale": tensors["2/keys.scale"].double()}), "of torch.float64"),
        (lambda tensors: tensors.update({"2/keys.scale": -tensors["2/keys.scale"]}), "but the manifest says"),
        (lambda tensors: tensors.update({"2/keys": tensors["2/keys"] - 9}), "but the manifest says"),
    ],
    ids=["float32 keys", "int64 keys", "no scales", "float64 scales", "negative scales", "negative keys"],
)
@pytest.mark.parametrize("run", ["int8"], indirect=True)
def test_forged_rows_of_int8_are_refused(run: Path, forge: Edit, problem: str) -> None:
    name = "shards/000000.safetensors"
    tensors = load_file(run / name)
    forge(tensors)
    save_file(tensors, run / name)
    sign(run, name)
    with pytest.raises(CorruptError, match=problem):
        ask(dualform.open(run))


def put(tensor: str, numbers: Any) -> Callable[[dict[str, Any], bytearray], object]:
    """Return an edit that puts numbers at the start of a tensor."""

    def edit(header: dict[str, Any], data: bytearray) -> None:
        begin = header[tensor]["data_offsets"][0]
        content = numbers.tobytes()
        data[begin : begin + len(content)] = content

    return edit


HEADERS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another shape": (lambda h: h["0/keys"].update(shape=[20, 4]), "in the size of its shape|the calls say"),
    "a tensor of another layer": (lambda h: h.update({"9/keys": h.pop("0/keys")}), "does not hold '0/keys'"),
    "a tensor more": (lambda h: h.update(x={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}), "belongs to no"),
    "an unknown dtype": (lambda h: h["0/keys"].update(dtype="F7"), "unknown dtype 'F7'"),
    "a negative offset": (lambda h: h["0/keys"].update(data_offsets=[-8, 8]), "its header is mangled"),
    "overlapping tensors": (lambda h: h["0/keys"].update(data_offsets=[0, 8]), "does not lie behind"),
    "offsets that are texts": (lambda h: h["0/keys"].update(data_offsets="x"), "its header is mangled"),
    "no dtype": (lambda h: h["0/keys"].pop("dtype"), "its header is mangled"),
    "another dtype of the same size": (lambda h: h["0/keys"].update(dtype="I32"), "the calls say"),
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_is_refused_with(what: str, run: Path) -> None:
    edit, match = HEADERS[what]
    edit_tensors(run, "shards/000001.safetensors", lambda header, _: edit(header))
    with pytest.raises(CorruptError, match=match):
        ask(dualform.open(run))


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b'{"x":' * 50_000 + b"1" + b"}" * 50_000, "nests too deeply"),
        (b"[]", "no JSON object"),
        (b"\xff" * 20, "cannot be read"),
        (b'{"x":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"x":1}', "comes twice"),
    ],
)
def test_a_header_that_is_none_is_refused(content: bytes, match: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(content).to_bytes(8, "little") + content)
    with pytest.raises(CorruptError, match=match):
        TensorFile(file_blob(path))


def test_a_header_without_end_and_a_rest_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for content, match in ((b"\xff" * 8, "is said to have"), (b"\x02" + b"\0" * 7 + b"{}rest", "4 bytes behind")):
        path.write_bytes(content)
        with pytest.raises(CorruptError, match=match):
            TensorFile(file_blob(path))


@pytest.mark.parametrize("run", ["mixed"], indirect=True)
def test_a_word_that_is_not_in_its_table_is_refused(run: Path) -> None:
    edit_tensors(run, "shards/000001.safetensors", put("table/keys", np.array([6], dtype=np.int64)))
    with pytest.raises(CorruptError, match="expected numbers from 0 to 5"):
        dualform.open(run).weights()


@pytest.mark.parametrize("run", ["mixed"], indirect=True)
@pytest.mark.parametrize("number", [-1, 8, 2**31 - 1])
def test_a_reference_that_is_not_in_the_pool_is_refused(run: Path, number: int) -> None:
    edit_tensors(run, "shards/000001.safetensors", put("first/references", np.array([number], dtype=np.int32)))
    with pytest.raises(CorruptError, match="expected numbers from 0 to 7"):
        dualform.open(run).weights()


@pytest.mark.parametrize("run", ["mixed"], indirect=True)
def test_a_manifest_without_its_pools_is_refused(run: Path) -> None:
    raw = json.loads((run / "manifest.json").read_text())
    for shard in raw["shards"]:
        shard["pools"] = {}
    write_manifest(run, raw)
    with pytest.raises(CorruptError, match="first/"):
        dualform.open(run).weights()


def test_a_range_that_keys_do_not_keep_fails_verify(run: Path) -> None:
    raw = json.loads((run / "manifest.json").read_text())
    raw["shards"][0]["key_range"]["0"][0] = 0.0  # some are negative
    write_manifest(run, raw)
    with pytest.raises(CorruptError, match=r"but the manifest says 0.0 to"):
        dualform.open(run).verify()
    del raw["shards"][0]["key_range"]["0"]
    write_manifest(run, raw)
    with pytest.raises(CorruptError, match="no range of the keys of layer '0'"):
        dualform.open(run).verify()


# Parameters -------------------------------------------------------------------------------------------------------


def test_initial_parameters_that_are_infinite_fail_verify(run: Path) -> None:
    edit_tensors(run, "initial.safetensors", put("0.weight", np.array([np.inf], dtype=np.float32)))
    assert not dualform.open(run).verify().passed


INITIAL: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a parameter less": (lambda h: h.update({"x:0.weight": h.pop("0.weight")}), "lacks the parameter '0.weight'"),
    "a parameter of another name": (lambda h: h.update({"x": h.pop("2.bias")}), "lacks the parameter"),
    "another shape": (lambda h: h["0.weight"].update(shape=[5, 4]), "is \\(5, 4\\) of float32"),
    "another dtype": (lambda h: h["0.weight"].update(dtype="I32"), "of int32; expected"),
    "state of an unknown parameter": (
        lambda h: h.update({"m:9.bias": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}),
        "which the manifest does not know",
    ),
    "state of another shape": (
        lambda h: h.update({"m:0.bias": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}),
        "unlike its parameter",
    ),
}


@pytest.mark.parametrize("what", INITIAL)
def test_initial_parameters_are_refused_with(what: str, run: Path) -> None:
    edit, match = INITIAL[what]
    edit_tensors(run, "initial.safetensors", lambda header, _: edit(header))
    with pytest.raises(CorruptError, match=match):
        dualform.open(run).weights()


def test_final_parameters_of_another_shape_are_refused(run: Path) -> None:
    edit_tensors(run, "final.safetensors", lambda header, _: header["0.weight"].update(shape=[5, 4]))
    with pytest.raises(CorruptError, match=r"final.safetensors: parameter '0.weight' is"):
        dualform.open(run).verify()


@pytest.mark.parametrize("run", ["adam"], indirect=True)
def test_a_warm_state_that_lacks_an_entry_or_never_was_is_refused(run: Path) -> None:
    content = (run / "initial.safetensors").read_bytes()
    rename = "exp_avg_sq:first.bias"
    edit_tensors(run, "initial.safetensors", lambda h, _: h.update({"x:first.bias": h.pop(rename)}))
    with pytest.raises(CorruptError, match="lacks 'exp_avg_sq'"):
        dualform.open(run).weights()
    (run / "initial.safetensors").write_bytes(content)
    edit_tensors(run, "initial.safetensors", put("step:first.bias", np.array([-1.0], dtype=np.float32)))
    with pytest.raises(CorruptError, match=r"'step' is of torch.float32, or out of range"):
        dualform.open(run).weights()


# Attachments ------------------------------------------------------------------------------------------------------


def test_attachments_that_cannot_be_such_are_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = dualform.open(run)
    memory.add_tests(torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64))
    memory.add_media(images=torch.zeros(2, 4, 4, dtype=torch.uint8), labels=["a"], mean=0.0, deviation=1.0)
    memory.add_corpus(dualform.Corpus.from_tokens([0, 1, 0], vocabulary=["a", "b"], unit="chars"))
    places = {name: entry.at for name, entry in Manifest.read(run).files.items()}

    def forge(name: str, content: bytes) -> Memory:
        (run / places[name]).write_bytes(content)
        return dualform.open(run)

    monkeypatch.setattr(Run, "_check_sizes", lambda self: None)  # which is not the subject here
    for text in (b'{"labels": 3}', b'{"labels": [1]}', b"[]", b'{"inputs": {"mean": "x"}}', b"[" * 9999):
        with pytest.raises(CorruptError, match="media-"):
            _ = forge("media/media.json", text).media
    for text in (b'{"name": "x"}', b"{}", b'{"name": 1, "unit": "chars"}'):
        with pytest.raises(CorruptError, match="vocabulary-"):
            forge("media/vocabulary.json", text).corpus()
    for name, question in (
        ("media/tests.safetensors", lambda memory: memory.tests()),
        ("media/images.safetensors", lambda memory: memory.media.image(0)),
        ("media/corpus.safetensors", lambda memory: memory.corpus()),
    ):
        other = (run / "initial.safetensors").read_bytes()
        if name == "media/images.safetensors":
            (run / places["media/media.json"]).write_bytes(b"{}")
        with pytest.raises(CorruptError, match=name.split(".")[0]):
            question(forge(name, other))
