"""Embeddings, normalisations and tied weights against live training and dense sums."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from dualform.recording.layers import find_kind
from helpers.loops import WITHIN
from helpers.pairs import pairwise

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-3),
}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
EVERY = pytest.mark.parametrize("optimizer", OPTIMIZERS)

NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "LayerNorm": (lambda: nn.LayerNorm(6), (5, 6)),
    "LayerNorm, two axes, no bias": (lambda: nn.LayerNorm((5, 6), bias=False), (5, 6)),
    "RMSNorm": (lambda: nn.RMSNorm(6, eps=1e-5), (5, 6)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (4, 7)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(6), (6,)),
    "BatchNorm1d, long": (lambda: nn.BatchNorm1d(4, momentum=None), (4, 5)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3), (3, 4, 2)),
    "BatchNorm2d, batch only": (lambda: nn.BatchNorm2d(3, track_running_stats=False), (3, 4, 2)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(2), (2, 2, 3, 2)),
}


def fit(
    run: Path, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Callable[[int], Tensor], steps: int = 40
) -> dualform.Memory:
    with dualform.record(model, optimizer, run, strict=True) as recorder:
        for step in range(steps):
            recorder.annotate(half=step % 2)
            optimizer.zero_grad()
            output = model(batch(step))
            (
                output * torch.linspace(-1, 1, output[0].numel()).to(output).reshape(output[0].shape)
            ).tanh().mean().backward()
            optimizer.step()
    return dualform.open(run)


def check(memory: dualform.Memory, model: nn.Module, layer: str, inputs: Tensor, dtype: torch.dtype) -> None:
    """Everything rebuilds; outputs, totals, masks and single contributions of one layer agree."""
    found = memory.verify(model)
    assert found.passed, found
    assert all((one.error or 0) <= WITHIN[dtype] for one in found.layers), found
    module = model.get_submodule(layer)
    kind = find_kind(module)
    assert kind is not None
    caught: list[tuple[Tensor, Tensor]] = []
    handle = module.register_forward_hook(lambda _, args, output: caught.append((args[0], output.detach())))
    model.eval()
    spotlight = memory.attend(model, inputs)[layer]
    handle.remove()
    live = kind.values(module, *caught[0])
    close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-8, "atol": 1e-11}
    torch.testing.assert_close(spotlight.output(), live, **close)
    flat = live.reshape(-1, live.shape[-1])
    totals = spotlight.totals("half", of="contribution").values
    torch.testing.assert_close(spotlight.start() + totals.sum(1), flat, **close)
    if dtype == torch.float64:
        each = spotlight.contributions()
        torch.testing.assert_close(spotlight.start() + each.sum(1), flat, **close)
        units = torch.zeros(len(spotlight), dtype=torch.int64)
        best = spotlight.top(3, of="contribution", unit=units).values[:, 0]
        torch.testing.assert_close(best, each[:, :, 0].topk(3, dim=1).values, **close)
    parts = [view.shares() for view in (memory.where(half=0), memory.without(half=0))]
    for name, share in memory.shares().items():
        torch.testing.assert_close(parts[0][name] + parts[1][name], share, **close)


@pytest.mark.mostly_slow(fast=7)
@pytest.mark.parametrize(("name", "optimizer", "dtype"), pairwise(NORMS, OPTIMIZERS, WITHIN), ids=str)
def test_normalisations(run: Path, name: str, optimizer: str, dtype: torch.dtype) -> None:
    make, shape = NORMS[name]
    torch.manual_seed(0)
    model = nn.Sequential(make(), nn.Tanh(), nn.Flatten(), nn.Linear(torch.Size(shape).numel(), 3)).to(dtype)

    def batch(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        return (2 * torch.randn(8, *shape, generator=generator, dtype=torch.float64) + 1).to(dtype)

    memory = fit(run, model, OPTIMIZERS[optimizer](model), batch)
    check(memory, model, "0", batch(999), dtype)


@pytest.mark.parametrize(("optimizer", "dtype", "padding"), pairwise(OPTIMIZERS, WITHIN, [None, 2]), ids=str)
def test_embeddings(run: Path, optimizer: str, dtype: torch.dtype, padding: int | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 5, padding_idx=padding), nn.Tanh(), nn.Linear(5, 3)).to(dtype)

    def batch(step: int) -> Tensor:
        return torch.randint(0, 7, (4, 6), generator=torch.Generator().manual_seed(step))

    memory = fit(run, model, OPTIMIZERS[optimizer](model), batch)
    check(memory, model, "0", batch(999), dtype)
    layer = memory.attend(model, batch(999))["0"]
    tokens = torch.cat([batch(step).reshape(-1) for step in range(40)])
    equal = (batch(999).reshape(-1, 1) == tokens).to(dtype)
    torch.testing.assert_close(layer.attention().to(dtype), equal, rtol=0, atol=0)
    counts = equal.reshape(24, 20, 2, 24).sum((1, 3))
    torch.testing.assert_close(layer.totals("half").values, counts, rtol=0, atol=0)
    torch.testing.assert_close(layer.totals("half", of="magnitude").values, counts, rtol=0, atol=0)
    rows = memory.patterns("0").slice(0, 24).to_pydict()
    assert rows["row"] == [i // 6 for i in range(24)]
    assert rows["position"] == [i % 6 for i in range(24)]


@pytest.mark.parametrize("options", [{"sparse": True}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}], ids=str)
def test_tables_that_are_not_covered_are_named(run: Path, options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Embedding(7, 5, **options), nn.Linear(5, 3))
    with pytest.warns(UserWarning, match="not recorded: '0.weight'"):
        dualform.record(model, torch.optim.SGD(model.parameters(), lr=0.1), run)


class Tied(nn.Module):
    """A small language model whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.norm = nn.LayerNorm(6)
        self.mix = nn.Linear(6, 6)
        self.out = nn.Linear(6, 9, bias=False)
        self.out.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.table(tokens))
        result: Tensor = self.out(functional.gelu(self.mix(hidden.cumsum(1))))
        return result


@pytest.mark.mostly_slow(fast=1)
@DTYPES
@EVERY
def test_a_table_that_is_also_the_output_layer(run: Path, optimizer: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Tied().to(dtype)
    steps = OPTIMIZERS[optimizer](model)
    with dualform.record(model, steps, run, strict=True) as recorder:
        for step in range(60):
            tokens = torch.randint(0, 9, (4, 7), generator=torch.Generator().manual_seed(step)).cumsum(1) % 9
            recorder.annotate(token=tokens[:, :-1])
            steps.zero_grad()
            functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            steps.step()
    memory = dualform.open(run)
    found = memory.verify(model)
    assert found.passed, found
    inputs = torch.randint(0, 9, (2, 6))
    close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-8, "atol": 1e-11}
    spotlight = memory.attend(model, inputs)
    torch.testing.assert_close(spotlight["out"].output(), model(inputs).detach(), **close)
    torch.testing.assert_close(spotlight["table"].output(), model.table(inputs).detach(), **close)
    parts = [view.shares()["table.weight"] for view in (memory.where("token < 4"), memory.without("token < 4"))]
    torch.testing.assert_close(parts[0] + parts[1], memory.shares()["table.weight"], **close)


class Conv1D(nn.Module):
    """What transformers' GPT-2 calls Conv1D: a linear layer whose weight is (d_in, d_out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(0.1 * torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return flat.view(*x.size()[:-1], self.nf)


Conv1D.__module__ = "transformers.pytorch_utils"


@DTYPES
@EVERY
def test_the_transposed_layer_of_transformers(run: Path, optimizer: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Conv1D(6, 4), nn.GELU(), Conv1D(3, 6)).to(dtype)

    def batch(step: int) -> Tensor:
        return torch.randn(4, 5, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype)

    memory = fit(run, model, OPTIMIZERS[optimizer](model), batch)
    check(memory, model, "0", batch(999), dtype)
    assert memory.layers["0"].kind == "transformers.Conv1D"
