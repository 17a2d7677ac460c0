"""A recorded run and the dense reference of the same training."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from dualform.attend.memory import Memory
from helpers.reference import Batch, Reference
from helpers.small import batch, columns, network, sgd

STEPS = 11


@dataclass
class Pair:
    """A memory, the model it was recorded of, and references that stopped after each number of steps."""

    path: Path
    memory: Memory
    model: nn.Sequential
    references: list[Reference]

    @property
    def reference(self) -> Reference:
        """The reference of the whole training."""
        return self.references[-1]

    def queries(self, layer: str, rows: int = 4) -> Tensor:
        """Return queries for a layer, (rows, d_in)."""
        inputs = batch(500, dtype=torch.float64, rows=rows)[0]
        return inputs if layer == "0" else self.model[:2](inputs).detach()


def notes(step: int) -> dict[str, Any]:
    """Return a step's annotations as lists."""
    return {name: entry.tolist() if isinstance(entry, Tensor) else entry for name, entry in columns(step).items()}


def train_both(path: Path, steps: int) -> Pair:
    """Record a training with schedule, clipping and accumulation, and do the same by the reference."""
    model = network(dtype=torch.float64)
    optimizer = sgd(model, dampening=0.1)
    reference = Reference(model)
    with dualform.record(model, optimizer, path, shard_bytes=2500) as recorder:
        for step in range(steps):
            lr = 0.2 / (1 + step / 10)
            batches = []
            optimizer.param_groups[0]["lr"] = lr
            optimizer.zero_grad()
            for number in (step, 103 + step) if step % 4 == 1 else (step,):
                inputs, labels = batch(number, dtype=torch.float64)
                found = notes(number)

                def loss(outputs: Tensor, labels: Tensor = labels) -> Tensor:
                    return functional.cross_entropy(outputs, labels)

                if found:
                    recorder.annotate(**found)
                loss(model(inputs)).backward()
                batches.append(Batch(inputs, loss, found))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.4)
            optimizer.step()
            chosen = {"lr": lr, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}
            reference.step(batches, chosen, max_norm=0.4)
    return Pair(path, dualform.open(path), model, [reference])


def train_horizons(folder: Path) -> Pair:
    """Return the run of eleven steps, float64, and its dense reference; `references[s]` is of the first s steps."""
    pairs = [train_both(folder / str(steps), steps) for steps in (0, 3, 6, STEPS)]
    whole = pairs[-1]
    by_step = {p.memory.step: p.reference for p in pairs}
    whole.references = [by_step.get(step, whole.reference) for step in range(STEPS + 1)]
    return whole
