"""What a replay costs that answers questions: beside the same training, run without any recording."""

import contextlib
import itertools
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

import dualform
from benchmarks.bench import Bench
from benchmarks.families.blocks import BLOCKS, WIDTH, blocks
from benchmarks.rows import Measured, at_most, row
from benchmarks.stores import MNIST, batches, bytes_of, classifier, images
from benchmarks.timing import seconds, timed_pairs, wait
from dualform.replaying.replay_executor import ReplayExecutor
from dualform.replaying.replayed_patterns import ReplayedPatterns
from dualform.store.reader import Run

QUERIES, BEST, SOURCES = 16, 100, 8
LINEAR = ["*.mix", "*.project", "*.grow", "*.shrink"]
ASKED = f"totals by group and top-{BEST} of {QUERIES} queries in every layer, proofs included"
Train = Callable[[Any], nn.Module]


class Stopwatch:
    """Takes the time of one training between two of its steps: the first ones have more to prepare, and try rows."""

    def __init__(self, device: torch.device, first: int, last: int) -> None:
        self._device = device
        self._at = first, last
        self.steps = last - first
        self._seen: list[float] = []

    def before(self, step: int) -> None:
        """Note that a step is about to begin."""
        if step in self._at:
            wait(self._device)
            self._seen.append(time.perf_counter())

    def take(self) -> float:
        """Return the seconds between the two steps, and begin anew."""
        (first, last), self._seen = self._seen, []
        return last - first


class PlainRecorder:
    """Stands for a recorder where nothing is recorded."""

    def annotate(self, **columns: Any) -> None:
        """Do nothing."""


@contextlib.contextmanager
def unrecorded(*_: Any, **__: Any) -> Iterator[PlainRecorder]:
    """A recording that records nothing."""
    yield PlainRecorder()


def _ask(bench: Bench, folder: Path, train: Train, by: str, seed: int) -> None:
    """Ask a run of steps for totals and the best patterns of queries that nobody has asked about before."""
    shutil.rmtree(folder / "cache", ignore_errors=True)
    source = ReplayedPatterns(Run(folder), train, held_bytes=0)
    memory = dualform.Memory(source, ReplayExecutor())
    generator = torch.Generator().manual_seed(seed)
    queries = {
        name: torch.randn(QUERIES, entry.d_in, generator=generator).to(bench.device)
        for name, entry in source.layers.items()
    }
    memory.attend(queries=queries).compute(dualform.Totals(by=by), dualform.Top(BEST))
    assert source.replays == 1, "all of it is found in one replay"


def _measure(bench: Bench, train: Train, stopwatch: Stopwatch, by: str) -> Measured:
    """Run a training plainly and as a replay that answers, in turn."""
    whole: dict[str, list[float]] = {"plain": [], "replayed": []}
    seeds = itertools.count()
    with bench.scratch() as folder:
        dualform.record_training(train, folder)
        stopwatch.take()

        def timed(name: str, work: Callable[[], object]) -> float:
            whole[name].append(seconds(work, bench.device))
            return stopwatch.take()

        pairs = timed_pairs(
            lambda: timed("replayed", lambda: _ask(bench, folder, train, by, next(seeds))),
            lambda: timed("plain", lambda: train(unrecorded)),
            *((0, 1, 1, 0) if bench.quick else (60, 3, 7, 1)),
        )
        size = bytes_of(folder)
    return Measured(
        pairs.ratio,
        pairs.spread,
        {
            "plain, ms per step": 1e3 * min(pairs.theirs) / stopwatch.steps,
            "replayed, ms per step": 1e3 * min(pairs.ours) / stopwatch.steps,
            "ratio of whole trainings, first steps and rows' trials included": min(whole["replayed"])
            / min(whole["plain"]),
            "ratio of processor times": pairs.processor,
            "steps memory, MB": size / 1e6,
        },
    )


@row(
    "replay",
    what=f"replay of the MNIST network 784-800-800-10, batch 128, SGD with momentum: {ASKED}",
    against="the same training without recording",
    cpu=at_most(1.6),
    optimizer="SGD",
)
@row(
    "replay-adamw",
    what="the same with AdamW",
    against="the same training without recording",
    cpu=at_most(1.6),
    optimizer="AdamW",
)
def mnist(bench: Bench, optimizer: Literal["SGD", "AdamW"]) -> Measured:
    inputs, labels, _ = images(bench)
    order = batches(len(inputs), bench.size(255, 6))
    stopwatch = Stopwatch(bench.device, *((128, 254) if not bench.quick else (2, 5)))

    def train(recording: Any) -> nn.Module:
        model, momentum = classifier(MNIST, bench.device)
        made = momentum if optimizer == "SGD" else torch.optim.AdamW(model.parameters(), lr=1e-3)
        with recording(model, made) as recorder:
            for step, rows in enumerate(order):
                stopwatch.before(step)
                recorder.annotate(sample=rows, label=labels[rows])
                made.zero_grad()
                functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
                made.step()
        return model

    return _measure(bench, train, stopwatch, "label")


@row(
    "replay-gpt2",
    what=f"replay of a GPT-2-small-sized model in float32, AdamW, 8 x 1,024 tokens: {ASKED}",
    against="the same training without recording, deterministic too",
    cuda=at_most(1.1),
    precision="float32",
)
@row(
    "replay-gpt2-bfloat16",
    what="the same under bfloat16 autocast",
    against="the same training without recording, deterministic too",
    cuda=at_most(1.4),
    why={
        "cuda": "Python: the training itself waits for it, 41 ms a step of which the GPU works 22. A profile gave "
        "about 13 ms a step to the hooks, 20 to the passes and 5 to the marks of parameters; the GPU's own time is "
        "1.45 times as long."
    },
    precision="bfloat16",
)
def gpt2(bench: Bench, precision: Literal["float32", "bfloat16"]) -> Measured:
    rows, length = (8, 1024) if not bench.quick else (2, 8)
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(rows, length, WIDTH, generator=generator).to(bench.device)
    sources = torch.arange(rows) % SOURCES
    stopwatch = Stopwatch(bench.device, *((32, 62) if not bench.quick else (2, 3)))

    def train(recording: Any) -> nn.Module:
        model = blocks(bench.size(BLOCKS, 2)).to(bench.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        with recording(model, optimizer, layers=LINEAR) as recorder:
            for step in range(bench.size(63, 4)):
                stopwatch.before(step)
                recorder.annotate(source=sources)
                optimizer.zero_grad()
                with torch.autocast(bench.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
                    loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
        return model

    with _deterministic():
        return _measure(bench, train, stopwatch, "source")


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Let torch use deterministic kernels only; CUBLAS_WORKSPACE_CONFIG has to be set before torch is first used."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
