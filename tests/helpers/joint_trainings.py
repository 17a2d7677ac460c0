"""Small trainings of several processes, with DistributedDataParallel or `fully_shard`, and of one with all rows."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from helpers.loops import state

STEPS = 24  # of which the last are not checked in full
Batch = tuple[Tensor, Tensor]


class Tied(nn.Module):
    """A Transformer whose output layer has the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(self.encoder(self.embedding(tokens)))
        return found


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def batches(model: nn.Module, steps: int, micros: int, rank: int | None, size: int = 2) -> Iterator[list[Batch]]:
    """Yield each step's batches: all rows, or those of a process."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        found = []
        for _ in range(micros):
            if isinstance(model, Tied):
                inputs, targets = torch.randint(11, (2, 4, 6), generator=generator).unbind()
            else:
                inputs = torch.randn(8, 5, generator=generator)
                targets = torch.randint(3, (8,), generator=generator)
            rows = slice(None) if rank is None else slice(rank * len(inputs) // size, (rank + 1) * len(inputs) // size)
            found.append((inputs[rows], targets[rows]))
        yield found


def train_jointly(
    recording: Callable[..., Any],
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    rank: int | None,
    *,
    micros: int = 1,
    no_sync: bool = False,
    clip: bool = False,
    wrap: dict[str, Any] | Literal["rows"] | None = None,
    hook: Any = None,
    steps: int = STEPS,
    scale: float = 1.0,
) -> dict[str, Tensor]:
    """Train in one process, or in one of several, inside of what `recording` returns; return the trained parameters."""
    plain = model
    if rank is not None and wrap == "rows":
        divide_by_rows(model)
    elif rank is not None:
        model = DistributedDataParallel(model, **(wrap or {}))  # type: ignore[arg-type]
        if hook is not None:
            model.register_comm_hook(None, hook)
    optimizer = make_optimizer(model)
    with recording(model, optimizer) as recorder:
        for step in batches(plain, steps, micros, rank):
            optimizer.zero_grad()
            for number, (inputs, targets) in enumerate(step):
                if recorder is not None:
                    recorder.annotate(label=targets)
                waiting = no_sync and rank is not None and number < micros - 1
                if isinstance(model, FSDPModule):
                    model.set_requires_gradient_sync(not waiting)
                    waiting = False
                with model.no_sync() if waiting else contextlib.nullcontext():  # type: ignore[operator]
                    output = model(inputs)
                    (F.cross_entropy(output.flatten(0, -2), targets.flatten()) * scale / micros).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
    return {name: getattr(tensor, "full_tensor", lambda t=tensor: t)() for name, tensor in state(plain).items()}


def divide_by_rows(model: nn.Module) -> None:
    """Divide a model's parameters by rows among two processes; those of some layers apart from the rest."""
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.modules():
        if isinstance(layer, nn.TransformerEncoderLayer) or (
            layer is next(model.children()) and not isinstance(model, Tied)
        ):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
