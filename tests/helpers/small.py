"""Small training runs that are the same every time: batches and annotations follow from the number of the step."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from dualform.store.reader import Run

ROWS = 6
SAMPLES = 10
State = dict[str, Tensor]


def network(*, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """Return a network of two linear layers, "0" (5 to 4) and "2" (4 to 3), with a ReLU between them."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).to(dtype)


def sgd(model: nn.Module, **settings: Any) -> torch.optim.SGD:
    """Return an optimizer with momentum and decay, unless told otherwise."""
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, **settings})


def batch(step: int, *, dtype: torch.dtype = torch.float32, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Return the inputs (rows, 5) of a step and their labels (rows,), which can be learnt."""
    generator = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), inputs[:, :3].argmax(dim=1)


def columns(step: int) -> dict[str, Any]:
    """Return the annotations of a step; every third step has none, and `mood` comes and goes."""
    if step % 3 == 2:
        return {}
    sample = (torch.arange(ROWS) + step * ROWS) % SAMPLES
    found: dict[str, Any] = {"sample": sample, "label": batch(step)[1], "task": "früh" if step < 5 else "spät"}
    if step % 2:
        found["mood"] = [0.5 * i - 1.0 for i in range(ROWS)]
    return found


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[int],
    recorder: dualform.Recorder | None = None,
    *,
    scale: float = 1.0,
) -> list[State]:
    """Take these steps; return the parameters after each."""
    states = []
    for step in steps:
        inputs, labels = batch(step, dtype=next(model.parameters()).dtype)
        if recorder is not None and (found := columns(step)):
            recorder.annotate(**found)
        optimizer.zero_grad()
        (scale * functional.cross_entropy(model(inputs), labels)).backward()
        optimizer.step()
        states.append(state(model))
    return states


def state(model: nn.Module) -> State:
    """Return a copy of the model's parameters."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def recorded(path: Path, steps: int, **options: Any) -> nn.Sequential:
    """Record a run of this many steps, a few of them in each shard; return the trained model."""
    model = network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path, **{"shard_bytes": 1000, **options}) as recorder:
        train(model, optimizer, range(steps), recorder)
    return model


def files(path: Path) -> set[str]:
    """Return the names of all files in a run folder."""
    return {found.relative_to(path).as_posix() for found in path.rglob("*") if found.is_file()}


def listed(path: Path) -> set[str]:
    """Return the names of all files that a run's manifest lists, and its own."""
    return {"manifest.json", *Run(path).files()}
