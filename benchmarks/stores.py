"""Networks, loops and recorded runs that several rows use, made through the public `dualform.record`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from benchmarks.bench import Bench
from benchmarks.timing import wait
from dualform.experiments.models import MLP
from dualform.recording.watch import What

BATCH = 128
MNIST = (784, 800, 800, 10)
CLASSES = 10


def classifier(widths: Sequence[int], device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the paper's network and its optimizer, the same every time."""
    torch.manual_seed(0)
    model = MLP(widths).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=3e-3, momentum=0.9)


def images(bench: Bench) -> tuple[Tensor, Tensor, str]:
    """Return MNIST as the network sees it, (60,000, 784), its labels, and its name; noise where there is none."""
    return bench.once("images", lambda: _images(bench))


def _images(bench: Bench) -> tuple[Tensor, Tensor, str]:
    from dualform.experiments.datasets import describe_datasets, load, standardised

    if not bench.quick and any(known.name == "mnist" and known.available for known in describe_datasets()):
        found = load("mnist")
        return standardised(found)[0], torch.from_numpy(found.train_labels), "MNIST"
    count = bench.size(60_000, 1024)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(count, MNIST[0], generator=generator)
    return noise, torch.randint(CLASSES, (count,), generator=generator), "noise in the shape of MNIST"


def batches(count: int, steps: int, batch: int = BATCH) -> list[Tensor]:
    """Return the row numbers of every batch: whole epochs, each in a new order."""
    generator = torch.Generator().manual_seed(1)
    found: list[Tensor] = []
    while len(found) < steps:
        found += torch.randperm(count, generator=generator)[: count - count % batch].split(batch)
    return found[:steps]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    labels: Tensor,
    order: Sequence[Tensor],
    *,
    recorder: Any = None,
    clip: float | None = 1.0,
    inside: list[float] | None = None,
) -> float:
    """Run the paper's loop (with `clip`, its gradient clipping) and return its seconds; the device's work included.

    What the training thread spent inside of the recorder, step by step, is added to `inside`.
    """
    device = inputs.device
    targets = labels.to(device)
    there = [rows.to(device) for rows in order]
    wait(device)
    start = time.perf_counter()
    for rows, at in zip(order, there, strict=True):
        if recorder is not None:
            recorder.annotate(sample=rows, label=labels[rows])
        loss = functional.cross_entropy(model(inputs[at]), targets[at])
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if inside is not None:
            inside.append(recorder.overhead)
    wait(device)
    return time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Well:
    """A layer that is fed with random keys of its own.

    Attributes:
        d_in: the width of its keys.
        d_out: the width of its values.
        signed: whether keys have both signs, or are never negative, as behind a ReLU.
        pool: how many different keys there are, seen in epochs, as an input layer does; 0 where every key is new.
    """

    d_in: int
    d_out: int = 1
    signed: bool = True
    pool: int = 0


class Wells(nn.Module):
    """Linear layers side by side: what each is given is what is recorded."""

    def __init__(self, wells: Sequence[Well]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(well.d_in, well.d_out, bias=False) for well in wells)

    def forward(self, keys: Sequence[Tensor]) -> list[Tensor]:
        """Return every layer's output."""
        return [layer(part) for layer, part in zip(self.layers, keys, strict=True)]


def store(bench: Bench, patterns: int, *wells: Well, batch: int = BATCH, values: bool = False) -> Path:
    """Return a run of random keys (and values) in the layers `layers.0`, ..., labelled with ten classes."""
    what = ("store", patterns, wells, batch, values)
    return bench.once(what, lambda: _store(bench, patterns, wells, batch, values))


def _store(bench: Bench, patterns: int, wells: Sequence[Well], batch: int, values: bool) -> Path:
    folder = bench.new_folder()
    torch.manual_seed(0)
    model = Wells(wells)
    pools = [_keys(well, well.pool) for well in wells]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    layers: dict[str, What] = {"*": "keys+values" if values else "keys"}
    with dualform.record(model, optimizer, folder, layers=layers) as recorder:
        for start in range(0, patterns, batch):
            rows = min(batch, patterns - start)
            recorder.annotate(label=torch.randint(CLASSES, (rows,)))
            numbers = torch.arange(start, start + rows)
            outputs = model(
                [  # keys that need a gradient are no input layer's, so they are not looked for among earlier ones
                    pool[numbers % well.pool] if well.pool else _keys(well, rows).requires_grad_()
                    for well, pool in zip(wells, pools, strict=True)
                ]
            )
            optimizer.zero_grad()
            torch.autograd.backward(outputs, [torch.randn_like(output) for output in outputs])  # the values
            optimizer.step()
    return folder


def _keys(well: Well, rows: int) -> Tensor:
    keys = torch.randn(rows, well.d_in)
    return keys if well.signed else keys.relu_()


def stored_keys(folder: Path, layer: str) -> Tensor:
    """Return all keys of a layer in memory, (T, d_in), in float32."""
    from dualform.engine.reading import read_blocks
    from dualform.store.reader import Run

    run = Run(folder)
    first = next(iter(read_blocks(run, layer, horizon=run.steps, size=1))).keys
    keys = torch.empty(run.count(layer), first.shape[1])
    taken = 0
    for chunk in read_blocks(run, layer, horizon=run.steps):
        keys[taken : taken + len(chunk.keys)] = chunk.keys
        taken += len(chunk.keys)
    return keys


def bytes_of(folder: Path) -> int:
    """Return the bytes of all files under a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
