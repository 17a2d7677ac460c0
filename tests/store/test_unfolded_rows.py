"""Inputs that are stored in place of a convolution's keys: every key, range, answer and file is as with stored keys."""

import itertools
import json
import math
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from dualform.identity import unfolding as unfoldings
from dualform.identity.unfolding import Unfolding
from dualform.recording.layers import layer_kind
from dualform.recording.layers.conv import Conv2d
from dualform.store.manifest import Manifest
from dualform.store.memory_blobs import MemoryBlobs
from dualform.store.reader import Run
from dualform.store.stored_rows import FileRows
from dualform.store.unfolded_rows import UnfoldedRows
from dualform.store.writer import DiskWriter

Layer = tuple[type[nn.Conv1d | nn.Conv2d | nn.Conv3d], dict[str, Any], tuple[int, ...]]
LAYERS: dict[str, Layer] = {
    "1-D": (nn.Conv1d, {"kernel_size": 3, "padding": 1}, (9,)),
    "1-D, same": (nn.Conv1d, {"kernel_size": 4, "padding": "same", "dilation": 2}, (9,)),
    "1-D, causal": (nn.Conv1d, {"kernel_size": 3, "padding": 4, "dilation": 2}, (9,)),
    "2-D": (nn.Conv2d, {"kernel_size": 3}, (6, 7)),
    "2-D, all": (nn.Conv2d, {"kernel_size": (2, 3), "stride": (2, 1), "padding": (1, 2), "dilation": (1, 2)}, (6, 7)),
    "2-D, stride with a rest": (nn.Conv2d, {"kernel_size": 3, "stride": 2}, (8, 10)),
    "2-D, gaps": (nn.Conv2d, {"kernel_size": (1, 5), "stride": (3, 1)}, (7, 9)),
    "2-D, circular": (nn.Conv2d, {"kernel_size": 3, "padding": 1, "padding_mode": "circular"}, (5, 5)),
    "2-D, reflect": (nn.Conv2d, {"kernel_size": 3, "padding": 2, "padding_mode": "reflect"}, (5, 6)),
    "2-D, replicate": (nn.Conv2d, {"kernel_size": 3, "padding": 1, "padding_mode": "replicate"}, (5, 4)),
    "2-D, groups": (nn.Conv2d, {"kernel_size": 3, "groups": 2, "padding": 1}, (5, 4)),
    "1-D, depthwise": (nn.Conv1d, {"kernel_size": 3, "groups": 4, "bias": False}, (7,)),
    "3-D": (nn.Conv3d, {"kernel_size": 2, "padding_mode": "replicate", "padding": 1}, (4, 3, 5)),
    "3-D, all": (nn.Conv3d, {"kernel_size": (2, 1, 3), "stride": (1, 2, 2), "dilation": (2, 1, 1)}, (5, 4, 9)),
}
MODES = {"zeros": "constant", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}


def padded(conv: Any, inputs: Tensor) -> Tensor:
    """Return inputs with a convolution's padding, by hand."""
    extents = [d * (k - 1) for k, d in zip(conv.kernel_size, conv.dilation, strict=True)]
    around = [
        (e // 2, e - e // 2) if conv.padding == "same" else 2 * (p,)
        for e, p in zip(extents, conv.padding * 3, strict=False)
    ]
    flat = [number for pair in reversed(around) for number in pair]
    return functional.pad(inputs, flat, mode=MODES[conv.padding_mode])


def dense_patches(conv: Any, inputs: Tensor) -> Tensor:
    """Return the patches, (T, channels × kernel), location by location; by torch's own `unfold` of two axes too."""
    images = padded(conv, inputs)
    grids = [
        range(0, size - d * (k - 1), s)
        for size, k, d, s in zip(images.shape[2:], conv.kernel_size, conv.dilation, conv.stride, strict=True)
    ]
    found = []
    for image in images:
        for begins in itertools.product(*grids):
            every = zip(begins, conv.kernel_size, conv.dilation, strict=True)
            place = tuple(slice(begin, begin + d * (k - 1) + 1, d) for begin, k, d in every)
            found.append(image[(slice(None), *place)].reshape(-1))
    rows = torch.stack(found)
    if images.dim() == 4:
        own = functional.unfold(images.double(), conv.kernel_size, conv.dilation, 0, conv.stride).transpose(1, 2)
        assert torch.equal(own.reshape(rows.shape), rows.double())
    return rows


def make(layer: str, dtype: torch.dtype) -> tuple[nn.Sequential, Tensor]:
    kind, options, size = LAYERS[layer]
    torch.manual_seed(0)
    inputs = torch.randn(12, 4, *size, dtype=dtype)
    model = nn.Sequential(kind(4, 4, **options), nn.ReLU(inplace=True), nn.Flatten(), nn.LazyLinear(3)).to(dtype)
    model(inputs)
    return model, inputs


def train(
    path: Path | MemoryBlobs, layer: str, *, trained: torch.dtype = torch.float32, steps: int = 6, **options: Any
) -> tuple[nn.Sequential, list[Tensor]]:
    """Record a small training with several calls a step; return the model and each call's inputs."""
    model, inputs = make(layer, trained)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    with dualform.record(model, optimizer, path, **options) as recorder:
        for step in range(steps):
            optimizer.zero_grad()
            for part in (0, 1):
                rows = torch.arange(4 * part + step % 4, 4 * part + step % 4 + 3 + part)
                recorder.annotate(sample=rows, label=rows % 3)
                seen.append(inputs[rows])
                functional.cross_entropy(model(inputs[rows]), rows % 3).backward()
            optimizer.step()
            if step == 3:  # so that there are two shards, of the same steps whatever is stored
                recorder.flush()
    return model, seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("most", [0, unfoldings.MAX_PLACES])
@pytest.mark.parametrize("layer", LAYERS)
def test_stored_inputs_give_the_dense_patches(
    run: Path, layer: str, most: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"layers": {"0": "keys", "3": "keys"}} if dtype == torch.bfloat16 else {}
    model, seen = train(run, layer, trained=dtype, shard_bytes=4000, **options)
    monkeypatch.setattr(unfoldings, "MAX_PLACES", most)
    expected = torch.cat([dense_patches(model[0], inputs) for inputs in seen])
    found = Run(run)
    at = 0
    for part in found.parts():
        rows = part.rows("0", "keys")
        assert isinstance(rows, UnfoldedRows)
        here = expected[at : at + len(rows)]
        at += len(rows)
        assert rows.dtype == dtype
        assert torch.equal(rows.take(slice(None))[0], here)
        buffer = torch.empty(here.nbytes, dtype=torch.uint8)
        generator = torch.Generator().manual_seed(len(here))
        for _ in range(12):
            start, stop = sorted(torch.randint(len(here) + 1, (2,), generator=generator).tolist())
            assert torch.equal(rows.take(slice(start, stop), buffer)[0], here[start:stop])
            index = torch.randint(len(here), (9,), generator=generator)
            assert torch.equal(rows.take(index)[0], here[index])
            assert torch.equal(rows.take(index.sort().values, buffer)[0], here[index.sort().values])
        assert rows.take(slice(3, 3))[0].shape == (0, here.shape[1])
        assert part.key_range("0") == (float(here.min()), float(here.max()))
    assert at == len(expected)
    assert dualform.open(run).verify().passed or dtype == torch.bfloat16


def answers(path: Path, model: nn.Sequential, inputs: Tensor) -> dict[str, Any]:
    """Return what a run answers, about its convolution foremost."""
    memory = dualform.open(path)
    targets = torch.zeros(2, dtype=torch.int64)
    spotlight = memory.attend(model, inputs[:2], targets=targets)
    layer = spotlight["0"]
    some = memory.where(label=1).unwarned()
    found: dict[str, Any] = {
        "attention": layer.attention(),
        "contributions": layer.contributions(),
        "output": layer.output(),
        "weights": memory.weights(),
        "some weights": some.weights(),
        "a horizon's weights": memory.at(step=3).weights(),
        "shares": {name: (one.labels, one.shares) for name, one in memory.shares("label").items()},
        "the attention of some": some.attend(model, inputs[:2])["0"].attention(),
        "patterns": memory.patterns("0").to_pydict(),
        "steps": memory.steps().drop_columns(["fingerprint"]).to_pydict(),
        "totals of contribution": layer.totals("label", of="contribution").values,
        "path contributions": spotlight.path_contributions("label", tolerance=0.5).values,
        "checks": [
            (check.parameter, check.error, check.bound)
            for one in memory.verify(model).layers
            for check in one.parameters
        ],
    }
    sorts: tuple[Literal["attention", "magnitude"], ...] = ("attention", "magnitude")
    for of in sorts:
        found[f"totals of {of}"] = layer.totals("label", of=of).values
        found[f"best by {of}"] = layer.top(7, of=of).to_arrow().to_pydict()
    return found


def assert_same(one: Any, other: Any) -> None:
    """Compare answers to the bit."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_same(one[name], other[name])
    elif isinstance(one, Tensor):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    elif isinstance(one, list | tuple) and one and isinstance(one[0], dict | Tensor | tuple):
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    else:
        assert repr(one) == repr(other)


@pytest.mark.mostly_slow(fast=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_answers_are_those_of_stored_keys(
    tmp_path: Path, layer: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seen = train(tmp_path / "inputs", layer, trained=dtype)
    with monkeypatch.context() as before:
        before.setattr(DiskWriter, "_unfolding", lambda *_: None)
        train(tmp_path / "keys", layer, trained=dtype)
    assert isinstance(Run(tmp_path / "inputs").parts()[0].rows("0", "keys"), UnfoldedRows)
    assert isinstance(Run(tmp_path / "keys").parts()[0].rows("0", "keys"), FileRows)
    inputs = seen[0]
    mine, theirs = answers(tmp_path / "inputs", model, inputs), answers(tmp_path / "keys", model, inputs)
    assert_same(mine, theirs)


def test_the_manifest_says_which_form_a_layer_has(tmp_path: Path) -> None:
    train(tmp_path / "run", "2-D, all")
    raw = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert raw["version"] == 5
    assert raw["layers"]["0"]["unfolding"] == {"kernel": [2, 3], "stride": [2, 1], "dilation": [1, 2]}
    assert "unfolding" not in raw["layers"]["3"]


OTHERS: dict[str, dict[str, Any]] = {
    "a kernel of one element": {"kernel_size": 1},
    "a stride as large as the kernel": {"kernel_size": 2, "stride": 2},
}


@pytest.mark.parametrize("name", OTHERS)
def test_keys_that_repeat_nothing_are_stored(run: Path, name: str) -> None:
    model = nn.Conv2d(2, 3, **OTHERS[name])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, run):
        model(torch.randn(2, 2, 4, 4)).square().sum().backward()
        optimizer.step()
    assert Manifest.read(run).layers[""].unfolding is None
    assert json.loads((run / "manifest.json").read_text())["version"] == 2


@pytest.mark.parametrize("stored", ["float16", "int8"])
@pytest.mark.parametrize("layer", ["2-D, all", "1-D", "3-D, all"])
def test_inputs_of_rows_with_scales_are_as_trained(run: Path, layer: str, stored: Any) -> None:
    """Values alone are rounded then; where inputs in full precision take more than rounded keys, keys are stored."""
    model, seen = train(run, layer, dtype=stored)
    unfolding = Unfolding(model[0].kernel_size, model[0].stride, model[0].dilation)  # type: ignore[arg-type]
    by_inputs = math.prod(unfolding.kernel) * (2 if stored == "float16" else 1) > 4 * math.prod(unfolding.stride)
    assert Manifest.read(run).layers["0"].unfolding == (unfolding if by_inputs else None)
    assert dualform.open(run).verify(model).passed
    if by_inputs:
        expected = torch.cat([dense_patches(model[0], inputs) for inputs in seen])
        found = torch.cat([part.rows("0", "keys").take(slice(None))[0] for part in Run(run).parts()])
        assert torch.equal(found, expected)
    estimated = dualform.estimate(model, seen[0], steps=1, dtype=stored)
    each = [dualform.estimate(model, inputs, steps=1, dtype=stored).layers["0"] for inputs in seen]
    assert estimated.layers["0"] == each[0]
    assert sum(each) == dualform.open(run).info().layers["0"]["bytes"]


def test_shares_are_kept_beside_keys(run: Path) -> None:
    model, _ = train(run, "2-D", keep=dualform.Shares(by="label"))
    assert Manifest.read(run).layers["0"].unfolding is None
    assert dualform.open(run).verify(model).passed


@pytest.mark.parametrize("most", [0, unfoldings.MAX_PLACES])
def test_inputs_are_read_by_ranges_where_there_is_no_file(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = MemoryBlobs()
    model, seen = train(blobs, "2-D, all")
    monkeypatch.setattr(unfoldings, "MAX_PLACES", most)
    expected = torch.cat([dense_patches(model[0], inputs) for inputs in seen])
    parts = Run(blobs).parts()
    assert torch.equal(torch.cat([part.rows("0", "keys").take(slice(None))[0] for part in parts]), expected)
    rows = parts[0].rows("0", "keys")
    index = torch.randperm(len(rows))[:20]
    assert torch.equal(rows.take(index)[0], expected[index])
    assert torch.equal(rows.take(slice(5, 31))[0], expected[5:31])


def test_inputs_of_several_sizes(run: Path) -> None:
    """Each call has sizes of its own; where there is only one location, keys are stored."""
    torch.manual_seed(0)
    model = nn.Conv1d(2, 3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    with dualform.record(model, optimizer, run) as recorder:
        for step in range(8):
            for length in (5, 5, 3, 9, 4 + step):
                seen.append(torch.randn(2, 2, length))
                recorder.annotate(sample=torch.arange(2), length=length)
                model(seen[-1]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    expected = torch.cat([dense_patches(model, inputs) for inputs in seen])
    (part,) = Run(run).parts()
    rows = part.rows("", "keys")
    assert isinstance(rows, UnfoldedRows)
    assert {block.sizes for block in rows.blocks.blocks} > {None, (5,), (9,)}
    assert torch.equal(rows.take(slice(None))[0], expected)
    index = torch.randperm(len(expected))[:40]
    assert torch.equal(rows.take(index)[0], expected[index])
    assert dualform.open(run).verify(model).passed


def test_a_run_with_stored_keys_goes_on_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("inputs", "keys"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Flatten(), nn.Linear(32, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for resume in (False, True):
            with monkeypatch.context() as before:
                if name == "keys" and not resume:
                    before.setattr(DiskWriter, "_unfolding", lambda *_: None)
                with dualform.record(model, optimizer, tmp_path / name, resume=resume):
                    for _ in range(3):
                        optimizer.zero_grad()
                        model(torch.randn(2, 1, 4, 4)).square().sum().backward()
                        optimizer.step()
        memory = dualform.open(tmp_path / name)
        assert memory.step == 6
        assert memory.verify(model).passed
        assert (memory.layers["0"].unfolding is None) == (name == "keys")


@pytest.mark.parametrize("mode", MODES)
def test_the_estimate_is_what_is_stored(run: Path, mode: Any) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode), nn.Conv2d(3, 2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(4, 2, 6, 5)
    estimated = dualform.estimate(model, inputs, steps=2)
    with dualform.record(model, optimizer, run):
        for _ in range(2):
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()
    memory = dualform.open(run)
    assert dict(estimated.layers) == {name: info["bytes"] for name, info in memory.info().layers.items()}
    assert estimated.layers["0"] == 2 * 4 * 4 * (2 * 8 * 7 + 30 * 3)


@pytest.mark.parametrize("layers", [None, {"*": "keys"}], ids=["all", "keys"])
@pytest.mark.parametrize("change", [{"stride": (2, 2)}, {"dilation": (2, 1)}], ids=["stride", "dilation"])
def test_a_convolution_that_is_changed_while_it_is_recorded(run: Path, change: dict[str, Any], layers: Any) -> None:
    """Its inputs are not those of the patches that the run describes, so from then on its keys are stored."""
    torch.manual_seed(0)
    model = nn.Conv2d(2, 3, 3, dilation=(1, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    expected = []
    with dualform.record(model, optimizer, run, layers=layers):
        for step in range(27):
            if step == 22:  # when not every step is checked in full
                for name, value in change.items():
                    setattr(model, name, value)
            inputs = torch.randn(2, 2, 9, 8)
            expected.append(dense_patches(model, inputs))
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    rows = [part.rows("", "keys") for part in Run(run).parts()]
    assert all(isinstance(one, UnfoldedRows) for one in rows)
    assert torch.equal(torch.cat([one.take(slice(None))[0] for one in rows]), torch.cat(expected))
    assert dualform.open(run).verify(model).passed


class SquashedConvolution(nn.Conv2d):
    """A convolution of what it makes of its input."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs.tanh())


class SquashedKind(Conv2d):
    name = "SquashedConvolution"

    def keys(self, module: nn.Module, inputs: Tensor) -> Tensor:
        return super().keys(module, inputs.tanh())


@pytest.mark.parametrize("layers", [None, {"*": "keys"}], ids=["all", "keys"])
def test_a_derived_kind_with_keys_of_its_own_has_them(
    run: Path, monkeypatch: pytest.MonkeyPatch, layers: dict[str, Literal["keys"]] | None
) -> None:
    monkeypatch.setattr(layer_kind, "_KINDS", dict(layer_kind._KINDS))
    dualform.register_layer(SquashedConvolution, SquashedKind)
    torch.manual_seed(0)
    model, inputs = SquashedConvolution(2, 3, 3), 3 * torch.randn(2, 2, 6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with dualform.record(model, optimizer, run, layers=layers):
        model(inputs).square().mean().backward()
        optimizer.step()
    (part,) = Run(run).parts()
    assert torch.equal(part.rows("", "keys").take(slice(None))[0], dense_patches(model, inputs.tanh()))
    assert dualform.open(run).verify(model).passed


def test_few_keys_and_many_of_a_large_input_are_the_same(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few are read in boxes, many from the whole input."""
    monkeypatch.setattr(unfoldings, "MAX_PLACES", 0)
    torch.manual_seed(0)
    model, inputs = nn.Conv2d(2, 3, (3, 2), stride=(1, 2), dilation=(2, 1)), torch.randn(2, 2, 40, 30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with dualform.record(model, optimizer, run):
        model(inputs).square().mean().backward()
        optimizer.step()
    (part,) = Run(run).parts()
    rows = part.rows("", "keys")
    assert isinstance(rows, UnfoldedRows)
    few, many = torch.tensor([3, 4, 700, 90]), torch.randperm(len(rows))[:600]
    assert rows._takes_boxes((40, 30), few.numpy())
    assert not rows._takes_boxes((40, 30), many.numpy())
    expected = dense_patches(model, inputs)
    for wanted in (few, many):
        assert torch.equal(rows.take(wanted)[0], expected[wanted])
