"""Weights that are divided other than by rows are refused by name at the start; keys alone are each process's own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import dualform
from dualform.errors import RefusedError
from helpers.loops import mlp, sgd
from helpers.together import run_together


def test_several_processes(tmp_path: Path) -> None:
    def network() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))

    def work(rank: int) -> dict[str, str]:
        def attempt(model: nn.Module, *, name: str = "keys", **options: Any) -> str:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            try:
                with dualform.record(model, optimizer, tmp_path / f"{name}{rank}", **options):
                    optimizer.zero_grad()
                    model(torch.randn(4, 5)).square().sum().backward()
                    optimizer.step()
            except dualform.DualformError as error:
                return f"{type(error).__name__} {error}"
            return "recorded"

        mesh = init_device_mesh("cpu", (2,))
        both = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "rows"))

        def sharded(**options: Any) -> nn.Module:
            model = nn.Sequential(nn.Linear(4, 4, bias=False))
            fully_shard(model, **options)
            return model

        divided = network()
        weight = divided.get_parameter("0.weight").detach()
        divided[0].weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
        inner = nn.Sequential(nn.Linear(5, 8))
        flat = FullyShardedDataParallel(inner, use_orig_params=True, device_id=torch.device("cpu"))
        parts = [tuple(parameter.shape) for parameter in flat.parameters()]
        zero = network()
        setattr(zero.get_parameter("0.weight"), "ds_id", 0)  # noqa: B010 (as DeepSpeed ZeRO marks what it divides)
        model = sharded(mesh=mesh)
        muon = torch.optim.Muon([model.get_parameter("0.weight")], lr=0.1)
        try:
            dualform.record(model, muon, tmp_path / "muon")
            matrices = "recorded"
        except dualform.DualformError as error:
            matrices = str(error)
        return {
            "keys": attempt(network(), layers={"*": "keys"}),
            "tensor parallel": attempt(divided),
            "columns": attempt(sharded(mesh=mesh, shard_placement_fn=lambda _: Shard(1)), name="columns"),
            "replicas": attempt(sharded(mesh=both), name="replicas"),
            "muon": matrices,
            "parts": str(parts),
            "FSDP1": attempt(flat, name="flat"),
            "inside of FSDP1": attempt(inner, name="flat"),
            "ZeRO": attempt(zero, name="zero"),
        }

    both = run_together(tmp_path, work)
    # Of a weight (8, 5) and a bias (8,) the first process has four rows and four fifths of the next, and no bias.
    assert [told["parts"] for told in both] == ["[(24,), (0,)]", "[(16,), (8,)]"]
    for told in both:
        assert told["keys"] == "recorded"  # in a folder for each process
        assert "it divides all weights of a module as one flat vector" in told["FSDP1"]
        assert "Parameter '0.weight' is divided by FullyShardedDataParallel" in told["inside of FSDP1"]
        assert "Parameter '0.weight' is divided by DeepSpeed ZeRO" in told["ZeRO"]
        for name in ("FSDP1", "inside of FSDP1", "ZeRO"):
            assert "fully_shard" in told[name]
        assert told["tensor parallel"].startswith("RefusedError Parameter '0.weight' is a DTensor that fully_shard did")
        assert "is divided along 2 axes of processes (HSDP, tensor parallelism)" in told["replicas"]
        assert "not by rows; that is not supported" in told["columns"]
        assert "Muon orthogonalises whole matrices" in told["muon"]


def test_a_wrapper_by_its_name_alone(run: Path) -> None:
    class FullyShardedDataParallel(nn.Module):
        """A stand-in: making a real one needs a group of processes."""

        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    model = mlp()
    with pytest.raises(RefusedError, match=r"FullyShardedDataParallel is not supported.*fully_shard"):
        dualform.record(FullyShardedDataParallel(model), sgd(model), run)
    with pytest.raises(RefusedError, match=r"DataParallel is not supported: it trains in several replicas"):
        dualform.estimate(nn.DataParallel(model), None, steps=1)
