"""The estimate is what is stored, to the byte."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import dualform
from dualform.recording.estimate import size_text
from dualform.recording.keep import Patterns, Shares
from helpers.loops import batches, loss_of, mlp, record, sgd, state


def stored(run: Path) -> dict[str, int]:
    """Return the bytes of keys and values by layer, as they lie in the shards."""
    sizes: dict[str, int] = {}
    for path in sorted((run / "shards").iterdir()):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                layer = name.split("/")[0]
                sizes[layer] = sizes.get(layer, 0) + file.get_tensor(name).nbytes
    return sizes


@pytest.mark.mostly_slow(fast=7)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("stored_dtype", [None, "float16", {"2": "int8"}, {"0": None, "*": "float16"}], ids=str)
@pytest.mark.parametrize("layers", [None, {"0": "keys", "2": "keys+values"}, {"*": "keys"}, "2"], ids=str)
@pytest.mark.filterwarnings("ignore:.*are not recorded")
def test_estimate_is_what_is_stored(run: Path, dtype: torch.dtype, stored_dtype: Any, layers: Any) -> None:
    model = mlp(dtype=dtype)
    options = {"layers": layers, "dtype": stored_dtype}
    estimated = dualform.estimate(model, batches(1, dtype=dtype)[0], steps=6, **options)
    memory = record(run, model, sgd(model), **options)
    assert dict(estimated.layers) == stored(run)
    assert estimated.total == sum(layer.bytes for layer in memory.verify(model).layers)
    assert dict(estimated.layers) == {name: info["bytes"] for name, info in memory.info().layers.items()}


def test_estimate_counts_every_call_and_position(run: Path) -> None:
    layer = nn.Linear(5, 5)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        estimated = recorder.estimate(torch.zeros(4, 3, 5), steps=6)
        for x in batches(6, 4, 3, 5):
            optimizer.zero_grad()
            loss_of(model(x)).backward()
            optimizer.step()
    assert dict(estimated.layers) == stored(run)
    assert estimated.total == 6 * 2 * 12 * (5 + 5) * 4


@pytest.mark.parametrize("stored_dtype", [None, "float16", "int8"])
def test_a_recorders_estimate_knows_its_options(run: Path, stored_dtype: Any) -> None:
    model = mlp()
    optimizer = sgd(model)
    with dualform.record(
        model, optimizer, run, layers={"0": "keys", "*": "keys+values"}, dtype=stored_dtype
    ) as recorder:
        estimated = recorder.estimate(batches(1)[0], steps=1)
        optimizer.zero_grad()
        loss_of(model(batches(1)[0])).backward()
        optimizer.step()
    assert dict(estimated.layers) == stored(run)


def test_estimate_changes_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))
    model[1].eval()
    before, buffers = state(model), {n: b.clone() for n, b in model.named_buffers()}
    random = torch.get_rng_state()
    dualform.estimate(model, batches(1)[0], steps=3)
    assert [module.training for module in model] == [True, False, True, True]
    torch.testing.assert_close(state(model), before, rtol=0, atol=0)
    torch.testing.assert_close(dict(model.named_buffers()), buffers, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random)
    assert not model[0]._forward_pre_hooks


@pytest.mark.parametrize("how", ["tuple", "mapping"])
def test_inputs_of_several_arguments(how: str) -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return self.layer(left + right)

    left, right = batches(2)
    inputs: Any = (left, right) if how == "tuple" else {"left": left, "right": right}
    assert dualform.estimate(Sum(), inputs, steps=10).total == 10 * 4 * 8 * 4


def test_estimates_read_well() -> None:
    text = repr(dualform.estimate(mlp(), torch.zeros(100, 5), steps=1000))
    assert text.splitlines()[0] == "Estimate for 1000 steps"
    assert text.splitlines()[-1].split() == ["total", "8.8", "MB"]
    assert size_text(999) == "999 B"
    assert size_text(5e15) == "5000.0 TB"


def test_shares_are_estimated_in_memory_and_on_disk() -> None:
    model = mlp()
    inputs = batches(1)[0]
    shares = Shares(by="label", groups=10)
    found = dualform.estimate(model, inputs, steps=1_000_000, keep=shares)
    elements = {"0": 7 * 5 + 7, "2": 3 * 7 + 3}
    # A share and an average of each group, two more shares, and two more averages.
    assert dict(found.layers) == {name: 4 * size * (2 * 10 + 4) for name, size in elements.items()}
    assert found.device == 4 * sum(elements.values()) * (2 * 10 + 2)
    assert found.free is not None
    assert found.free > 0
    assert "of memory for shares while training, where" in repr(found)
    earlier = dualform.estimate(model, inputs, steps=9, keep=Shares(by="label", groups=10, at=[3, 6]))
    assert earlier.total - found.total == 2 * 4 * sum(elements.values()) * 12
    reading = dualform.estimate(model, inputs, steps=9, keep=Shares(by="label", groups=10, resumable=False))
    assert reading.total == 4 * sum(elements.values()) * 11
    several = dualform.estimate(model, inputs, steps=9, keep=Shares(by=[["label"], ["label", "task"]], groups=5))
    assert several.device == found.device
    both = dualform.estimate(model, inputs, steps=6, keep=[shares, Patterns(layers="2")])
    patterns = dualform.estimate(model, inputs, steps=6, layers="2")
    assert both.total == found.total + patterns.total
    assert dualform.estimate(model.double(), inputs.double(), steps=6, keep=shares).device == 2 * found.device
