"""Inputs that are stored in place of a convolution's keys: every key, range, answer and file is as with stored keys."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from dualform.identity import unfolding as unfoldings
from dualform.store.reader import Run
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
    path: Path, layer: str, *, dtype: torch.dtype = torch.float32, steps: int = 6, **options: Any
) -> tuple[nn.Sequential, list[Tensor]]:
    """Record a small training with several calls a step; return the model and each call's inputs."""
    model, inputs = make(layer, dtype)
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
    return model, seen


@pytest.fixture
def keys_stored() -> Iterator[pytest.MonkeyPatch]:
    """Let runs be recorded with keys in their files, as they were before."""
    context = pytest.MonkeyPatch()
    context.setattr(DiskWriter, "_unfolding", lambda *_: None)
    yield context
    context.undo()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("most", [0, unfoldings.MAX_PLACES])
@pytest.mark.parametrize("layer", LAYERS)
def test_stored_inputs_give_the_dense_patches(
    run: Path, layer: str, most: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"layers": {"0": "keys", "3": "keys"}} if dtype == torch.bfloat16 else {}
    model, seen = train(run, layer, dtype=dtype, shard_bytes=4000, **options)
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
