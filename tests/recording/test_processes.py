"""Trainings in several processes: refused by name at the start, but for keys, which are each process's own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import dualform
from dualform.errors import RefusedError
from helpers.loops import mlp, sgd

TWO_PROCESSES = """
import sys
import torch, dualform
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())


def attempt(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with dualform.record(model, optimizer, sys.argv[1], **options):
            optimizer.zero_grad()
            model(torch.randn(4, 5)).square().sum().backward()
            optimizer.step()
        print("recorded")
    except dualform.DualformError as error:
        print(type(error).__name__, error)


def network():
    return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))


attempt(network())
attempt(network(), layers={"0": "keys", "1": "keys+values"})
attempt(network(), layers={"*": "keys"})
attempt(nn.parallel.DistributedDataParallel(network()))

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor, Shard

mesh = init_device_mesh("cpu", (2,))
for layers in (None, {"*": "keys"}):
    model = network()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    attempt(fully_shard(model, mesh=mesh), layers=layers)
model = network()
model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, [Shard(0)]))
attempt(model)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_several_processes(run: Path) -> None:
    source = str(Path(dualform.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", TWO_PROCESSES, str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    plain, mixed, keys, wrapped, sharded, sharded_keys, divided = done.stdout.splitlines()
    for answer in (plain, mixed):
        assert answer.startswith("RefusedError This is one of 2 processes")
        assert "several processes" in answer
        assert 'layers={"*": "keys"}' in answer
    assert keys == "recorded"
    assert wrapped.startswith("RefusedError DistributedDataParallel is not supported: it trains in several processes")
    for answer in (sharded, sharded_keys):
        assert answer.startswith("RefusedError FSDPSequential is not supported: fully_shard divides its weights among")
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
