"""Files in parts: the safetensors library reads what we write, and we read what it writes; damage is named."""

import io
from pathlib import Path
from typing import Literal

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import dualform
from dualform.engine.reading import BlockReader, pattern_ranges, read_blocks
from dualform.errors import CorruptError
from dualform.store import reader
from dualform.store import tensors as tensors_module
from dualform.store.stored_rows import FileRows
from dualform.store.tensors import OpenFiles, TensorFile, write_parts, write_tensors
from helpers.blob_files import file_blob, write_parts_file

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]


def make(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.randint(100, shape, dtype=dtype)


@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.integers(0, 5), st.lists(st.integers(0, 4), min_size=1, max_size=4)),
        min_size=1,
        max_size=6,
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_library_reads_what_was_written_in_parts(
    tmp_path: Path, tensors: list[tuple[torch.dtype, int, list[int]]]
) -> None:
    parts = {
        f"{i}": [make(dtype, rows, width) if width else make(dtype, rows) for rows in counts]
        for i, (dtype, width, counts) in enumerate(tensors)
    }
    path = tmp_path / "x.safetensors"
    write_parts_file(path, parts)
    whole = {name: torch.cat(each) for name, each in parts.items()}
    found = safetensors.torch.load_file(path)
    file = TensorFile(file_blob(path))
    assert found.keys() == file.places.keys() == whole.keys()
    for name, expected in whole.items():
        place = file.place(name)
        assert torch.equal(found[name], expected)
        assert torch.equal(file.tensor(name), expected)
        assert torch.equal(file.read(place, 0, len(expected)), expected)
        middle = len(expected) // 2
        assert torch.equal(file.read(place, middle, len(expected)), expected[middle:])
        buffer = torch.empty(expected.nbytes + 3, dtype=torch.uint8)
        assert torch.equal(file.read(place, 0, middle, buffer), expected[:middle])


@pytest.mark.parametrize("dtype", tensors_module._CODES)
@pytest.mark.parametrize("joined_bytes", [0, 48, 200, 1 << 18])
def test_parts_that_are_joined_make_the_same_file(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, joined_bytes: int
) -> None:
    """Whatever is joined, the file is that of the whole tensors."""
    monkeypatch.setattr(tensors_module, "JOINED_BYTES", joined_bytes)
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(2, (60, 3, 2, dtype.itemsize), generator=generator, dtype=torch.uint8)
    rows = bits.flatten(1).view(dtype).view(60, 3, 2)
    counts = (1, 0, 2, 1, 30, 0, 4, 3, 3, 3, 10, 3)
    written, expected = io.BytesIO(), io.BytesIO()
    write_parts(
        written,
        {
            "a": rows.split(counts),
            "b": rows[:, 0, 0].split(counts),
            "c": rows[:, :0].split(counts),
            "d": [rows[:0]],
            "e": rows.transpose(1, 2).split(counts),
        },
    )
    write_tensors(expected, {"a": rows, "b": rows[:, 0, 0], "c": rows[:, :0], "d": rows[:0], "e": rows.transpose(1, 2)})
    assert written.getvalue() == expected.getvalue()


@pytest.mark.parametrize("keep_mapped", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@given(index=st.one_of(st.lists(st.integers(0, 49), max_size=20), st.tuples(st.integers(0, 50), st.integers(0, 50))))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_of_a_file_are_those_of_the_tensor(tmp_path: Path, index: object, scaled: bool, keep_mapped: bool) -> None:
    torch.manual_seed(0)
    rows, scales = torch.randn(60, 7), torch.rand(60)
    path = tmp_path / "x.safetensors"
    write_parts_file(path, {"rows": [rows]} | ({"rows.scale": [scales]} if scaled else {}))
    file = TensorFile(file_blob(path), keep_mapped=keep_mapped)
    source = FileRows(lambda: file, "rows", 50)  # without the last
    wanted = slice(*index) if isinstance(index, tuple) else torch.tensor(index, dtype=torch.int64)
    for into in (None, torch.empty(7 * 4 * 50, dtype=torch.uint8), torch.empty(9, dtype=torch.uint8)):
        stored, found = source.take(wanted, into)
        assert torch.equal(stored, rows[:50][wanted])
        assert (found is not None) == scaled
        assert found is None or torch.equal(found, scales[:50][wanted])


def test_what_the_library_wrote_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"a": torch.arange(6).reshape(2, 3)}, path, metadata={"who": "the library"})
    file = TensorFile(file_blob(path))
    assert list(file.places) == ["a"]
    assert torch.equal(file.tensor("a"), torch.arange(6).reshape(2, 3))


@pytest.mark.parametrize(
    "damage",
    [b"", b"half", (1 << 40).to_bytes(8, "little"), (4).to_bytes(8, "little") + b"{no}"],
    ids=["empty", "half", "long", "mangled"],
)
def test_a_damaged_file_is_named(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(damage)
    with pytest.raises(CorruptError, match=r"x\.safetensors"):
        TensorFile(file_blob(path))


def test_a_file_that_is_cut_short_or_lacks_a_tensor_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_parts_file(path, {"a": [torch.zeros(100)]})
    file = TensorFile(file_blob(path))
    with pytest.raises(CorruptError, match="does not hold 'b'"):
        file.place("b")
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(CorruptError, match="ends too early"):
        file.read(file.place("a"), 0, 100)
    with pytest.raises(CorruptError, match="within the file"):
        TensorFile(file_blob(path))
    path.unlink()
    with pytest.raises(CorruptError, match="cannot be read"):
        TensorFile(file_blob(path))


def test_files_are_closed_when_too_many_are_open(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.safetensors" for i in range(5)]
    for path in paths:
        write_parts_file(path, {"a": [torch.zeros(3)]})
    files = OpenFiles(2, keep_mapped=False)
    first = files.get(file_blob(paths[0]))
    assert files.get(file_blob(paths[0])) is first
    before = len(list(Path("/proc/self/fd").iterdir()))
    for path in paths[1:]:
        files.get(file_blob(path))
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 2
    assert torch.equal(first.read(first.place("a"), 0, 3), torch.zeros(3)), "one that is in use stays open"


@pytest.mark.parametrize("dtype", [None, "float16"])
@pytest.mark.parametrize("mapped", [0, 1 << 30])
def test_chunks_in_the_same_memory_are_those_in_their_own(
    tmp_path: Path, dtype: Literal["float16"] | None, mapped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "MAPPED_RUN_BYTES", mapped)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(20, 40)
    with dualform.record(model, optimizer, tmp_path / "run", dtype=dtype, shard_bytes=4000) as _:
        for step in range(6):
            optimizer.zero_grad()
            model(inputs[step % 3 :: 2]).square().mean().backward()
            optimizer.step()
    run = reader.Run(tmp_path / "run")
    assert len(run.shards) > 1
    for layer in run.layers:
        own = list(read_blocks(run, layer, horizon=6, values=True, size=7))
        read = BlockReader(run, layer, horizon=6, values=True)
        keys, values = (torch.empty(8 * 7 * 40, dtype=torch.uint8) for _ in range(2))
        for wanted, other in zip(pattern_ranges(run, layer, horizon=6, size=7), own, strict=True):
            one = read.read(wanted, keys, values)
            assert torch.equal(one.keys, other.keys)
            assert one.values is not None
            assert other.values is not None
            assert torch.equal(one.values, other.values)
    assert dualform.open(tmp_path / "run").verify(model).passed
