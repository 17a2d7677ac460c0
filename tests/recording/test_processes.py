"""Trainings whose weights are divided are refused by name at the start; keys alone are each process's own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import dualform
from dualform.errors import RefusedError
from helpers.loops import mlp, sgd
from helpers.together import run_together


def test_several_processes(tmp_path: Path) -> None:
    def network() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))

    def work(rank: int) -> list[str]:
        def attempt(model: nn.Module, **options: Any) -> str:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            try:
                with dualform.record(model, optimizer, tmp_path / f"keys{rank}", **options):
                    optimizer.zero_grad()
                    model(torch.randn(4, 5)).square().sum().backward()
                    optimizer.step()
            except dualform.DualformError as error:
                return f"{type(error).__name__} {error}"
            return "recorded"

        mesh = init_device_mesh("cpu", (2,))
        sharded: nn.Module = network()
        for layer in sharded.children():
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        divided = network()
        weight = divided.get_parameter("0.weight").detach()
        divided[0].weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
        return [attempt(network(), layers={"*": "keys"}), attempt(sharded), attempt(divided)]

    for keys, sharded, divided in run_together(tmp_path, work):
        assert keys == "recorded"  # in a folder for each process
        assert sharded.startswith("RefusedError FSDPSequential is not supported: fully_shard divides its weights among")
        assert divided.startswith("RefusedError Parameter '0.weight' is a DTensor")


def test_a_wrapper_by_its_name_alone(run: Path) -> None:
    class FullyShardedDataParallel(nn.Module):
        """A stand-in: making a real one needs a group of processes."""

        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    model = mlp()
    with pytest.raises(RefusedError, match=r"FullyShardedDataParallel is not supported.*several processes"):
        dualform.record(FullyShardedDataParallel(model), sgd(model), run)
    with pytest.raises(RefusedError, match=r"DataParallel is not supported: it trains in several replicas"):
        dualform.estimate(nn.DataParallel(model), None, steps=1)
