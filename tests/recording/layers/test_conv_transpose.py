"""Transposed convolutions against torch's own product and live training, with every option."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dualform
from dualform.errors import RefusedError
from dualform.recording.layers import find_kind
from helpers.loops import tolerances
from helpers.pairs import pairwise

OPTIONS: dict[str, tuple[type[nn.Module], dict[str, Any], tuple[int, ...]]] = {
    "1-D": (nn.ConvTranspose1d, {"kernel_size": 3}, (5,)),
    "1-D, stride": (nn.ConvTranspose1d, {"kernel_size": 4, "stride": 2, "padding": 1}, (5,)),
    "1-D, stride beyond the kernel": (nn.ConvTranspose1d, {"kernel_size": 2, "stride": 3, "output_padding": 2}, (5,)),
    "1-D, padding beyond the kernel": (nn.ConvTranspose1d, {"kernel_size": 2, "padding": 2, "stride": 2}, (6,)),
    "1-D, depthwise": (nn.ConvTranspose1d, {"kernel_size": 3, "groups": 4, "bias": False}, (3,)),
    "2-D, all": (
        nn.ConvTranspose2d,
        {
            "kernel_size": (2, 3),
            "stride": (2, 3),
            "padding": (1, 2),
            "output_padding": (1, 0),
            "dilation": (2, 1),
            "groups": 2,
        },
        (3, 2),
    ),
    "2-D, output padding by dilation": (
        nn.ConvTranspose2d,
        {"kernel_size": 2, "dilation": 2, "output_padding": 1},
        (2, 2),
    ),
    "3-D": (nn.ConvTranspose3d, {"kernel_size": 2, "stride": 2, "output_padding": 1, "bias": False}, (1, 2, 2)),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_patches_times_kernel_are_the_output(name: str) -> None:
    make, options, size = OPTIONS[name]
    torch.manual_seed(0)
    layer = make(4, 8, **options).double()
    kind = find_kind(layer)
    assert kind is not None
    inputs = torch.randn(3, 4, *size, dtype=torch.float64)
    patches = kind.keys(layer, inputs)
    rows = patches.flatten(0, -2)
    rebuilt = torch.stack([u.parameter_map.apply(layer.get_parameter(u.parameter), rows) for u in kind.uses(layer)])
    live = kind.values(layer, inputs, layer(inputs))
    torch.testing.assert_close(rebuilt.sum(0).reshape(live.shape), live, rtol=1e-12, atol=1e-12)
    assert kind.widths(layer) == (patches.shape[-1], live.shape[-1])
    torch.testing.assert_close(kind.keys(layer, inputs[0]), patches[:1], rtol=0, atol=0)


def train(layer: nn.Module, size: tuple[int, ...], run: Path, name: str, dtype: torch.dtype) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 4, 1) if len(size) == 1 else nn.Identity(), layer, nn.Tanh()).to(dtype)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.05, weight_decay=1e-3)
    with dualform.record(model, optimizer, run, strict=True) as recorder:
        for step in range(20):
            batch = torch.randn(4, 4, *size, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            recorder.annotate(sample=torch.arange(4), half=step % 2)
            optimizer.zero_grad()
            output = model(batch.to(dtype))
            (output * torch.linspace(-1, 1, output[0].numel()).to(output).reshape(output[0].shape)).mean().backward()
            optimizer.step()
    return dualform.open(run), model


@pytest.mark.mostly_slow(fast=4)
@pytest.mark.parametrize(
    ("name", "optimizer", "dtype"), pairwise(OPTIONS, ["SGD", "AdamW"], [torch.float32, torch.float64]), ids=str
)
def test_kernels_are_rebuilt(run: Path, name: str, optimizer: str, dtype: torch.dtype) -> None:
    make, options, size = OPTIONS[name]
    memory, model = train(make(4, 4, **options), size, run, optimizer, dtype)
    found = memory.verify(model)
    assert found.passed, found
    assert dtype == torch.float32 or all((layer.error or 0) <= 1e-11 for layer in found.layers), found
    inputs = torch.randn(2, 4, *size, dtype=dtype)
    close = tolerances(dtype)
    spotlight = memory.attend(model, inputs)["1"]
    assert isinstance(model, nn.Sequential)
    live = model[:2](inputs).detach().movedim(1, -1)
    torch.testing.assert_close(spotlight.output(), live, **close)
    totals = spotlight.totals("sample", of="contribution").values.sum(1) + spotlight.start()
    torch.testing.assert_close(totals.reshape(live.shape), live, **close)
    kept, left_out = (view.shares()["1.weight"] for view in (memory.where(half=0), memory.without(half=0)))
    torch.testing.assert_close(kept + left_out, memory.shares()["1.weight"], **close)
    rows = memory.patterns("1").to_pydict()
    assert max(rows["row"]) == 3
    assert max(rows["position"]) == live[0, ..., 0].numel() - 1
    assert rows["sample"] == rows["row"]


def test_training_is_equal_to_the_bit(run: Path) -> None:
    def fit(*, record: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.ConvTranspose2d(2, 3, 3, stride=2), nn.ReLU(inplace=True), nn.ConvTranspose2d(3, 1, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        def steps() -> None:
            for _ in range(5):
                optimizer.zero_grad()
                model(torch.randn(3, 2, 4, 4)).square().mean().backward()
                optimizer.step()

        if record:
            with dualform.record(model, optimizer, run):
                steps()
        else:
            steps()
        return model.state_dict()

    plain, recorded = fit(record=False), fit(record=True)
    assert all(torch.equal(tensor, recorded[name]) for name, tensor in plain.items())


def test_effects_work_without_groups_and_are_refused_with_them(run: Path) -> None:
    """The layer is linear with whole values where it has no groups."""
    for groups in (1, 2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.ConvTranspose1d(2, 2, 2, groups=groups), nn.Tanh(), nn.Flatten(), nn.Linear(10, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        path = run / str(groups)
        with dualform.record(model, optimizer, path) as recorder:
            for _ in range(12):
                recorder.annotate(sample=torch.arange(6))
                optimizer.zero_grad()
                inputs = torch.randn(6, 2, 4)
                nn.functional.cross_entropy(model(inputs), torch.arange(6) % 3).backward()
                optimizer.step()
        spotlight = dualform.open(path).attend(model, torch.randn(2, 2, 4), targets=torch.tensor([0, 1]))
        if groups == 1:
            assert spotlight["0"].totals("sample", of="effect").values.shape == (2, 6)
        else:
            with pytest.raises(dualform.errors.QueryError, match="ConvTranspose1d is not of the linear family"):
                spotlight["0"].totals("sample", of="effect")


class Restoring(nn.Module):
    """Makes its input smaller, and then as large as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(2, 3, 3, stride=3)
        self.up = nn.ConvTranspose2d(3, 2, 3, stride=3)
        self.head = nn.Conv2d(2, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Take (B, 2, H, W)."""
        result: Tensor = self.head(self.up(self.down(x).tanh(), output_size=x.shape[2:]).tanh())
        return result


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_call_may_choose_its_output_size(run: Path, name: str) -> None:
    """The same layer gets inputs of one size for outputs of several."""
    torch.manual_seed(0)
    model = Restoring().double()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.05)
    sizes = [(6, 7), (7, 8), (8, 6)]
    with dualform.record(model, optimizer, run, strict=True) as recorder:
        for step in range(9):
            recorder.annotate(sample=torch.arange(4))
            optimizer.zero_grad()
            output = model(torch.randn(4, 2, *sizes[step % 3]).double())
            (output * torch.linspace(-1, 1, output.numel()).to(output).reshape(output.shape)).sin().mean().backward()
            optimizer.step()
    memory = dualform.open(run)
    found = memory.verify(model)
    assert found.passed, found
    assert all((layer.error or 0) <= 1e-11 for layer in found.layers), found
    assert memory.patterns("up").num_rows == 4 * sum(height * width for height, width in 3 * sizes)
    inputs = torch.randn(2, 2, 8, 7).double()
    live = model.up(model.down(inputs).tanh(), output_size=(8, 7)).detach()
    spotlight = memory.attend(model, inputs)["up"]
    torch.testing.assert_close(spotlight.output(), live.movedim(1, -1), rtol=1e-9, atol=1e-11)


def test_a_layer_that_is_not_initialised_is_refused(run: Path) -> None:
    lazy = nn.LazyConvTranspose1d(2, 3, groups=2)
    with pytest.raises(RefusedError, match="not initialised"):
        dualform.record(lazy, torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), run, layers=[""])
