"""How near the recorder comes to the disk when training is faster than the disk."""

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import dualform
from benchmarks.bench import Bench
from benchmarks.rows import Measured, at_least, row
from benchmarks.stores import bytes_of
from benchmarks.timing import timed_pairs

WIDTH = 2048
PIECE = 128 << 20  # bytes between two fsyncs, as much as a shard


@row(
    "disk",
    what="rate to disk when training outruns the disk",
    against="the disk's own sequential write rate (the same bytes, synced every 128 MB)",
    unit="percent",
    cpu=at_least(0.8),
    cuda=at_least(0.8),
    why={
        "cpu": "two cores: all keys are inputs of the model, which are copied, and the writer looks them up among "
        "earlier ones, finds their range, copies and sums them: each passes over memory that no cache holds, beside "
        "the loop's own. The loop does not make the bytes in the time in which the disk writes them.",
        "cuda": "the loop ends before the last shards are looked up and written, which the details call draining.",
    },
)
def disk(bench: Bench) -> Measured:
    rows = bench.size(4096, 64)
    steps = bench.size(40, 2)
    inputs = torch.randn(steps, rows, WIDTH)  # all different: nothing may be stored once instead of twice
    on_device = inputs.to(bench.device)
    written: list[int] = []
    drained: list[float] = []
    model = nn.Linear(WIDTH, 8).to(bench.device)

    def recorded() -> float:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        with bench.scratch() as folder:
            start = time.perf_counter()
            with dualform.record(model, optimizer, folder):
                for batch in on_device:
                    optimizer.zero_grad()
                    model(batch).square().mean().backward()
                    optimizer.step()
                loop = time.perf_counter()
            end = time.perf_counter()
            drained.append(end - loop)
            written.append(bytes_of(folder))
        return end - start

    def plain() -> float:
        with bench.scratch() as folder:
            folder.mkdir(parents=True)
            return write(folder, inputs)

    pairs = timed_pairs(recorded, plain, 60, 1 if bench.quick else 3, 1 if bench.quick else 9, 0 if bench.quick else 1)
    share = [written[-1] / a * b / inputs.nbytes for a, b in zip(pairs.ours, pairs.theirs, strict=True)]
    return Measured(
        written[-1] / min(pairs.ours) / (inputs.nbytes / min(pairs.theirs)),
        (min(share), max(share)),
        {
            "bytes": written[-1],
            "disk, MB/s": inputs.nbytes / min(pairs.theirs) / 1e6,
            "recorder, MB/s": written[-1] / min(pairs.ours) / 1e6,
            "of that, draining at close, s": min(drained),
            "recorder, s": min(pairs.ours),
            "median of the pairs' ratios": sorted(share)[len(share) // 2],
        },
    )


def write(folder: Path, tensor: Tensor) -> float:
    """Write a tensor's bytes into files of `PIECE` bytes, each synced, and return the seconds."""
    view = tensor.reshape(-1).numpy().data.cast("B")
    start = time.perf_counter()
    for number, begin in enumerate(range(0, len(view), PIECE)):
        with (folder / str(number)).open("wb", buffering=0) as file:
            rest = view[begin : begin + PIECE]
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
    return time.perf_counter() - start
