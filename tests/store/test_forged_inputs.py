"""Forged sizes and unfoldings of stored inputs: refused by name, before memory is taken for them."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dualform
from dualform.errors import CorruptError, FormatError
from dualform.identity.unfolding import Unfolding
from dualform.store import reader, unfolding_check
from dualform.store.reader import Run
from dualform.store.tensors import TensorFile
from dualform.store.unfolded_rows import UnfoldedRows
from helpers.forged_tables import Edit, cell, edit_table
from helpers.manifests import write_manifest


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inputs") / "run"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Flatten(), nn.Linear(48, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, path):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 2, 4, 4)).square().sum().backward()
            optimizer.step()
    return path


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "copy")
    return tmp_path / "copy"


def ask(path: Path) -> None:
    """Ask what reads the tables and the inputs."""
    memory = dualform.open(path)
    memory.patterns("0")
    memory.weights()


def test_the_good_run_answers(original: Path) -> None:
    ask(original)
    assert dualform.open(original).verify().passed


SIZES: dict[str, tuple[Edit, str]] = {
    "other sizes": (cell("sizes", 0, "6,5"), "'6,5' are no sizes of inputs"),
    "sizes for gigabytes": (cell("sizes", 0, "999999999999,999999999999"), "are no sizes of inputs"),
    "sizes below the kernel": (cell("sizes", 0, "2,6"), "'2,6' are no sizes"),
    "sizes of nothing": (cell("sizes", 0, "0,0"), "'0,0' are no sizes"),
    "one size": (cell("sizes", 0, "36"), "'36' are no sizes"),
    "sizes that are none": (cell("sizes", 0, "6;6"), "'6;6' are no sizes"),
    "negative sizes": (cell("sizes", 0, "-6,-6"), "'-6,-6' are no sizes"),
    "larger inputs": (cell("sizes", 0, "3,18"), "the calls say"),
    "keys in place of inputs": (cell("sizes", 0, None), "the calls say"),
    "sizes of another layer's inputs": (cell("sizes", 1, "6,6"), "layer '2' has sizes of inputs, but its keys are"),
    "no sizes at all": (lambda table: table.drop_columns(["sizes"]), "the calls say"),
    "sizes of another type": (
        lambda table: table.set_column(table.column_names.index("sizes"), "sizes", table["rows"]),
        "its columns are",
    ),
    "rows that are not there": (cell("rows", -2, 8), "the calls say"),
    "rows for gigabytes": (cell("rows", -2, 2**35), "the calls say"),
}


@pytest.mark.parametrize("what", SIZES)
def test_calls_are_refused_with(what: str, run: Path) -> None:
    edit, match = SIZES[what]
    edit_table(run, "calls/000000.parquet", edit)
    with pytest.raises(CorruptError, match=match):
        ask(run)


UNFOLDINGS: dict[str, tuple[dict[str, Any], str]] = {
    "no axes": ({"kernel": [], "stride": [], "dilation": []}, "has not one kernel size"),
    "four axes": ({"kernel": [1] * 4, "stride": [1] * 4, "dilation": [1] * 4}, "up to three axes"),
    "a stride less": ({"stride": [1]}, "has not one kernel size, stride"),
    "a stride of nothing": ({"stride": [0, 1]}, "expected numbers from 1 on"),
    "a negative dilation": ({"dilation": [1, -1]}, "expected numbers from 1 on"),
    "a dilation beyond memory": ({"dilation": [2**60, 1]}, "expected numbers from 1 on"),
    "a number beyond 64 bits": ({"stride": [2**70, 1]}, "lacks or mangles"),
    "a text": ({"kernel": ["3", 3]}, "lacks or mangles"),
    "another kernel": ({"kernel": [5, 3]}, "are no patches under a kernel"),
    "a kernel less": ({"kernel": None}, "lacks or mangles"),
}


@pytest.mark.parametrize("what", UNFOLDINGS)
def test_a_manifest_is_refused_with(what: str, run: Path) -> None:
    change, match = UNFOLDINGS[what]
    raw = json.loads((run / "manifest.json").read_text())
    raw["layers"]["0"]["unfolding"] |= change
    write_manifest(run, raw)
    with pytest.raises(FormatError, match=match):
        ask(run)


@pytest.mark.parametrize(("layer", "entry"), [("2", {}), ("0", {"store": "shares"})])
def test_a_layer_that_cannot_have_an_unfolding_is_refused(layer: str, entry: dict[str, Any], run: Path) -> None:
    raw = json.loads((run / "manifest.json").read_text())
    raw["layers"][layer] |= {"unfolding": copy.deepcopy(raw["layers"]["0"]["unfolding"]), **entry}
    write_manifest(run, raw)
    with pytest.raises(FormatError, match=r"are no patches under|its inputs cannot be stored"):
        ask(run)


@pytest.mark.parametrize("change", [{"stride": [2, 1]}, {"dilation": [2, 1]}, {"kernel": [1, 9]}])
def test_an_unfolding_of_other_calls_is_refused(change: dict[str, Any], run: Path) -> None:
    raw = json.loads((run / "manifest.json").read_text())
    raw["layers"]["0"]["unfolding"] |= change
    write_manifest(run, raw)
    with pytest.raises(CorruptError, match=r"are no sizes of inputs|the calls say"):
        ask(run)


def test_an_unfolding_is_no_more_than_sizes_allow() -> None:
    """A small input cannot be said to have billions of patches."""
    wide = Unfolding((100, 100), (1, 1), (1, 1))
    assert not wide.is_smaller((200, 200))
    assert unfolding_check.count_elements(wide, 10_000, "200,200", 101 * 101) is None
    assert unfolding_check.count_elements(Unfolding((3,), (1,), (1,)), 3, "5", 3) == 5
    assert unfolding_check.count_elements(Unfolding((3,), (1,), (1,)), 3, "5", 4) is None


def test_few_keys_of_large_inputs_are_read_without_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of keys takes about its own memory of inputs, where files are too large to be mapped."""
    monkeypatch.setattr(reader, "MAPPED_RUN_BYTES", 0)
    torch.manual_seed(0)
    model = nn.Conv2d(2, 1, (3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    inputs = torch.randn(3, 2, 300, 300)
    with dualform.record(model, optimizer, tmp_path / "run"):
        model(inputs).sum().backward()
        optimizer.step()
    (part,) = Run(tmp_path / "run").parts()
    rows = part.rows("", "keys")
    assert isinstance(rows, UnfoldedRows)
    plain = Unfolding((3, 3), (1, 1), (1, 1)).patches(inputs).reshape(-1, 18)
    taken = [0]
    read = TensorFile.read

    def counted(file: TensorFile, place: Any, start: int, stop: int, into: Tensor | None = None) -> Tensor:
        taken[0] += stop - start
        return read(file, place, start, stop, into)

    monkeypatch.setattr(TensorFile, "read", counted)
    for start, stop in ((0, 1), (100, 500), (298 * 298 - 7, 298 * 298 + 9), (150_000, 152_000)):
        taken[0] = 0
        assert torch.equal(rows.take(slice(start, stop))[0], plain[start:stop])
        assert taken[0] <= 2 * 300 * (2 * 3 + 2 * 3 + (stop - start) // 298)
    taken[0] = 0
    index = torch.tensor([5, 6, 90_000, 200_000])
    assert torch.equal(rows.take(index)[0], plain[index])
    assert taken[0] <= 3 * 2 * 3 * 300
