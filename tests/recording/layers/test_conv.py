"""Convolutions against live training: every option, both optimizer families, patches against torch's own product."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from dualform.experiments.datasets import load, standardised
from dualform.identity import unfolding as unfoldings
from dualform.identity.unfolding import Unfolding
from dualform.recording.layers import find_kind
from helpers.loops import WITHIN
from helpers.pairs import pairwise

OPTIONS: dict[str, tuple[type[nn.Conv1d | nn.Conv2d | nn.Conv3d], dict[str, Any], tuple[int, ...]]] = {
    "1-D": (nn.Conv1d, {"kernel_size": 3, "padding": 1}, (9,)),
    "1-D, same": (nn.Conv1d, {"kernel_size": 4, "padding": "same", "dilation": 2}, (9,)),
    "2-D": (nn.Conv2d, {"kernel_size": 3}, (6, 7)),
    "2-D, all": (nn.Conv2d, {"kernel_size": (2, 3), "stride": (2, 1), "padding": (1, 2), "dilation": (1, 2)}, (6, 7)),
    "2-D, circular": (nn.Conv2d, {"kernel_size": 3, "padding": 1, "padding_mode": "circular"}, (5, 5)),
    "2-D, no bias": (nn.Conv2d, {"kernel_size": 2, "bias": False, "padding": "valid"}, (4, 4)),
    "2-D, groups": (nn.Conv2d, {"kernel_size": 3, "groups": 2, "padding": 1}, (5, 4)),
    "1-D, depthwise": (nn.Conv1d, {"kernel_size": 3, "groups": 4, "bias": False}, (7,)),
    "3-D": (nn.Conv3d, {"kernel_size": 2, "stride": 2, "padding_mode": "replicate", "padding": 1}, (4, 3, 5)),
}
OPTIMIZERS = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_patches_times_kernel_are_the_output(name: str) -> None:
    make, options, size = OPTIONS[name]
    torch.manual_seed(0)
    conv = make(4, 8, **options).double()
    kind = find_kind(conv)
    assert kind is not None
    inputs = torch.randn(3, 4, *size, dtype=torch.float64)
    output = conv(inputs)
    patches = kind.keys(conv, inputs)
    kernel = kind.uses(conv)[0]
    flat = kernel.parameter_map.apply(conv.weight, patches.flatten(0, -2))
    rebuilt = flat.reshape(*patches.shape[:-1], -1) + (0 if conv.bias is None else conv.bias)
    torch.testing.assert_close(rebuilt, kind.values(conv, inputs, output), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(kind.keys(conv, inputs[0]), patches[:1], rtol=0, atol=0)


STEPS = 24  # of which checks see all of the first 20, and some of the others


@pytest.mark.mostly_slow(fast=4)
@pytest.mark.parametrize(("name", "optimizer", "dtype"), pairwise(OPTIONS, OPTIMIZERS, WITHIN), ids=str)
def test_kernels_are_rebuilt(run: Path, name: str, optimizer: str, dtype: torch.dtype) -> None:
    make, options, size = OPTIONS[name]
    torch.manual_seed(0)
    model = nn.Sequential(make(4, 4, **options), nn.ReLU(inplace=True), nn.Flatten(), nn.LazyLinear(3)).to(dtype)
    inputs = torch.randn(4, 4, *size, dtype=dtype)
    model(inputs)
    steps = OPTIMIZERS[optimizer](model)
    middle: dict[str, Tensor] = {}
    with dualform.record(model, steps, run, strict=True) as recorder:
        for step in range(STEPS):
            batch = torch.randn(4, 4, *size, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            labels = batch.flatten(1)[:, :3].argmax(1)
            recorder.annotate(label=labels, half=step % 2)
            steps.zero_grad()
            functional.cross_entropy(model(batch.to(dtype)), labels).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            steps.step()
            if step == STEPS // 2 - 1:
                middle = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    memory = dualform.open(run)
    found = memory.verify(model)
    assert found.passed
    assert all((layer.error or 0) <= WITHIN[dtype] for layer in found.layers)
    assert memory.at(step=STEPS // 2).verify(middle).passed
    layer = memory.attend(model, inputs)["0"]
    kind = find_kind(model[0])
    assert kind is not None
    live = kind.values(model[0], inputs, model[0](inputs).detach())
    close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(layer.output(), live, **close)
    totals = layer.totals("label", of="contribution").values.sum(1) + layer.start()
    torch.testing.assert_close(totals.reshape(live.shape), live, **close)
    parts = [view.shares()["0.weight"] for view in (memory.where(half=0), memory.without(half=0))]
    torch.testing.assert_close(parts[0] + parts[1], memory.shares()["0.weight"], **close)
    masked = memory.where(half=0).apply(model)
    torch.testing.assert_close(
        masked.get_parameter("0.weight"), memory.where(half=0).weights()["0.weight"], rtol=0, atol=0
    )
    rows = memory.patterns("0").to_pydict()
    assert len(rows["row"]) == STEPS * live[..., 0].numel()
    assert max(rows["row"]) == 3
    assert max(rows["position"]) == live[0, ..., 0].numel() - 1


def test_contributions_of_single_patches(run: Path) -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(1, 2, 2).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    with dualform.record(model, optimizer, run):
        for step in range(8):
            optimizer.zero_grad()
            model(torch.randn(2, 1, 3, 3, dtype=torch.float64) + step).square().mean().backward()
            optimizer.step()
    inputs = torch.randn(1, 1, 3, 3, dtype=torch.float64)
    layer = dualform.open(run).attend(model, inputs)[""]
    live = model(inputs).detach().movedim(1, -1).reshape(-1, 2)
    torch.testing.assert_close(layer.contributions().sum(1) + layer.start(), live, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_a_network_on_digits_learns_and_is_covered(run: Path) -> None:
    images = load("digits")
    train, test = standardised(images)
    labels, wanted = torch.from_numpy(images.train_labels), torch.from_numpy(images.test_labels)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    with dualform.record(model, optimizer, run, strict=True) as recorder:
        for _ in range(150):
            rows = torch.randint(len(train), (32,), generator=generator)
            recorder.annotate(label=labels[rows], sample=rows)
            optimizer.zero_grad()
            functional.cross_entropy(model(train[rows]), labels[rows]).backward()
            optimizer.step()
    memory = dualform.open(run)
    assert memory.verify(model).passed
    assert float((model(test).argmax(1) == wanted).double().mean()) > 0.9
    top = memory.attend(model, test[:2])["4"].top(3).to_arrow()
    assert set(top["label"].to_pylist()) <= set(range(10))


@pytest.mark.parametrize("most", [0, unfoldings.MAX_PLACES])
@pytest.mark.parametrize("option", OPTIONS)
def test_patches_are_the_same_in_every_way(option: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unfoldings, "MAX_PLACES", most)
    kind, settings, size = OPTIONS[option]
    conv = kind(4, 8, **settings)
    unfolding = Unfolding(conv.kernel_size, conv.stride, conv.dilation)
    padded = torch.randn(3, 4, *(length + 4 for length in size))
    for inputs in (padded, padded[:0], padded.bfloat16(), padded.movedim(1, -1).contiguous().movedim(-1, 1)):
        plain = unfolding.patches(inputs)
        assert torch.equal(unfolding.rows(inputs), plain.reshape(-1, plain.shape[-1]))


@pytest.mark.parametrize(
    ("sizes", "kernel", "stride", "dilation"),
    [((9,), (3,), (1,), (1,)), ((7, 8), (3, 2), (2, 1), (1, 2)), ((4, 5, 6), (2, 3, 2), (1, 1, 2), (1, 1, 1))],
)
def test_products_with_patches_are_found_without_them(
    sizes: tuple[int, ...], kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> None:
    unfolding = Unfolding(kernel, stride, dilation)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(3, 2, *sizes, generator=generator, dtype=torch.float64)
    columns = torch.randn(2 * math.prod(kernel), 4, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(unfolding.project(inputs, columns), unfolding.rows(inputs) @ columns)
