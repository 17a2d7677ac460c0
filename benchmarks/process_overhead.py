"""What recording adds to a training step, in one process and in several with the same rows each.

    python benchmarks/process_overhead.py
    torchrun --nproc_per_node 2 benchmarks/process_overhead.py
    torchrun --nproc_per_node 2 benchmarks/process_overhead.py --rows
    torchrun --nproc_per_node 2 benchmarks/process_overhead.py --rows --shares
    torchrun --nproc_per_node 2 benchmarks/process_overhead.py --replay

With `--rows` the processes divide the weights by rows (fully_shard); without, each has all of them. With `--shares`
shares by the ten labels are kept, instead of patterns. Plain and recorded steps alternate in one program, ten at a
time; the least and the median time of each are printed. With `--replay` the training alone alternates with replays of
it that find the 10 best patterns for 16 queries in every layer.
"""

import contextlib
import os
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import dualform
from dualform.attend.memory import Memory
from dualform.replaying.replay_executor import ReplayExecutor
from dualform.replaying.replayed_patterns import ReplayedPatterns
from dualform.store.reader import Run

ROWS = 64  # of each process
WIDTH = 512
ROUNDS = 12
STEPS = 10  # of each kind in a round
FIRST_STEPS = 40  # which are checked in full, and not measured
REPLAYS = 5
REPLAYED_STEPS = 60


def make(*, wrapped: bool, divided: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a network of three linear layers and its optimizer."""
    torch.manual_seed(0)
    layers = [nn.Linear(256, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)]
    model: nn.Module = nn.Sequential(*layers)
    if divided:
        for part in (*model.children(), model):
            if part is model or isinstance(part, nn.Linear):
                fully_shard(part, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    elif wrapped:
        model = DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters())


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, recorder: Any, steps: int) -> list[float]:
    """Train, and return the seconds of each step."""
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(ROWS, 256, generator=generator), torch.randint(10, (ROWS,), generator=generator)
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        if recorder is not None:
            recorder.annotate(label=labels)
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    return seconds


def measure_replays(folder: str, *, wrapped: bool, divided: bool) -> tuple[list[float], list[float]]:
    """Return the seconds of a step in trainings alone, and in replays of the training that answer a question."""

    def train(recording: Any) -> None:
        model, optimizer = make(wrapped=wrapped, divided=divided)
        with recording(model, optimizer) as recorder:
            take_steps(model, optimizer, recorder, REPLAYED_STEPS)

    dualform.record_training(train, f"{folder}/steps")
    model = make(wrapped=False, divided=False)[0]
    alone, replayed = [], []
    for number in range(REPLAYS):
        begin = time.perf_counter()
        train(lambda model, optimizer: contextlib.nullcontext())
        alone.append((time.perf_counter() - begin) / REPLAYED_STEPS)
        source = ReplayedPatterns(Run(f"{folder}/steps"), train, held_bytes=0)
        queries = torch.randn(16, 256, generator=torch.Generator().manual_seed(number))
        spotlight = Memory(source, ReplayExecutor()).attend(model, queries, other_model=True)
        begin = time.perf_counter()
        spotlight.compute(dualform.Top(10))
        replayed.append((time.perf_counter() - begin) / REPLAYED_STEPS)
    return alone, replayed


def main() -> None:
    """Measure, and print one line."""
    torch.set_num_threads(1)
    several = "RANK" in os.environ
    names = [tempfile.mkdtemp()]
    if several:
        torch.distributed.init_process_group("gloo")
        torch.distributed.broadcast_object_list(names)
    divided = "--rows" in sys.argv
    if "--replay" in sys.argv:
        alone, replayed = measure_replays(names[0], wrapped=several, divided=divided)
        print_times(several, alone, replayed, "replayed")
    else:
        print_times(several, *measure_recording(names[0], wrapped=several, divided=divided), "recorded")
    if several:
        torch.distributed.destroy_process_group()


def measure_recording(folder: str, *, wrapped: bool, divided: bool) -> tuple[list[float], list[float]]:
    """Return the seconds of steps alone, and of steps that are recorded."""
    plain, recorded = (make(wrapped=wrapped, divided=divided) for _ in range(2))
    alone: list[float] = []
    with_recording: list[float] = []
    keep = dualform.Shares(by="label") if "--shares" in sys.argv else None
    with dualform.record(*recorded, f"{folder}/run", keep=keep) as recorder:
        take_steps(*recorded, recorder, FIRST_STEPS)
        take_steps(*plain, None, STEPS)
        for _ in range(ROUNDS):
            alone += take_steps(*plain, None, STEPS)
            with_recording += take_steps(*recorded, recorder, STEPS)
    return alone, with_recording


def print_times(several: bool, alone: list[float], more: list[float], what_more: str) -> None:
    """Print the least and the median time of a step, alone and with more, in the first process."""
    if not several or torch.distributed.get_rank() == 0:
        count = torch.distributed.get_world_size() if several else 1
        for what, of in (("least", min), ("median", statistics.median)):
            before, after = 1e3 * of(alone), 1e3 * of(more)
            print(f"{count} processes, {what} time of a step: {before:.2f} ms alone, {after:.2f} ms {what_more}")


if __name__ == "__main__":
    main()
