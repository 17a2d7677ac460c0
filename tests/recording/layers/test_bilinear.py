"""Bilinear layers: the key is the outer product of the two inputs."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dualform
from helpers.loops import tolerances


class Similar(nn.Module):
    """Compares two inputs, each behind a layer of its own."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 3), nn.Linear(4, 5)
        self.pair = nn.Bilinear(3, 5, 2, bias=bias)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        result: Tensor = self.pair(self.one(x).tanh(), input2=self.two(y).tanh())
        return result


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_a_bilinear_layer_is_recorded(run: Path, name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Similar(bias=name == "SGD").to(dtype)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.05)
    with dualform.record(model, optimizer, run, strict=True) as recorder:
        for step in range(20):
            recorder.annotate(sample=torch.arange(6), half=step % 2)
            optimizer.zero_grad()
            model(torch.randn(6, 4, dtype=dtype), torch.randn(6, 4, dtype=dtype)).sin().mean().backward()
            optimizer.step()
    memory = dualform.open(run)
    found = memory.verify(model)
    assert found.passed, found
    assert dtype == torch.float32 or all((layer.error or 0) <= 1e-11 for layer in found.layers), found
    x, y = torch.randn(2, 4, dtype=dtype), torch.randn(2, 4, dtype=dtype)
    layer = memory.attend(model, (x, y))["pair"]
    live = model(x, y).detach()
    close = tolerances(dtype)
    torch.testing.assert_close(layer.output(), live, **close)
    totals = layer.totals("sample", of="contribution").values.sum(1) + layer.start()
    torch.testing.assert_close(totals, live, **close)
    masked = memory.where(half=0).apply(model)
    torch.testing.assert_close(
        masked.get_parameter("pair.weight"), memory.where(half=0).weights()["pair.weight"], rtol=0, atol=0
    )


def test_attention_is_the_product_of_two_attentions(run: Path) -> None:
    torch.manual_seed(0)
    model = nn.Bilinear(3, 5, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pairs = [(torch.randn(4, 3).double(), torch.randn(4, 5).double()) for _ in range(3)]
    with dualform.record(model, optimizer, run):
        for x, y in pairs:
            optimizer.zero_grad()
            model(x, y).sin().sum().backward()
            optimizer.step()
    x, y = torch.randn(2, 3).double(), torch.randn(2, 5).double()
    attention = dualform.open(run).attend(model, (x, y))[""].attention()
    first, second = (torch.cat(part) for part in zip(*pairs, strict=True))
    torch.testing.assert_close(attention, (x @ first.T) * (y @ second.T))
