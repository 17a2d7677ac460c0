"""A GPT-2-small-sized model on a GPU: what recording one layer, one block or all blocks adds to its steps."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

import dualform
from benchmarks.bench import Bench
from benchmarks.families.blocks import BLOCKS, WIDTH, blocks
from benchmarks.families.disk import write
from benchmarks.rows import REPORTED, Measured, at_least, at_most, row
from benchmarks.stores import bytes_of
from benchmarks.timing import Pairs, timed_pairs, wait
from dualform.recording.check_schedule import FIRST_STEPS
from dualform.recording.sinks import CallRecord, StepFacts
from dualform.store.host_copy import HostCopier, HostCopy

LINEAR = ("mix", "project", "grow", "shrink")
TIMED_STEPS = 16
Precision = Literal["float32", "bfloat16"]


@dataclass(slots=True)
class Training:
    """A model of blocks, its optimizer, and one batch."""

    bench: Bench
    precision: Precision
    model: nn.Module = field(init=False)
    batch: Tensor = field(init=False)

    def __post_init__(self) -> None:
        count = self.bench.size(BLOCKS, 2)
        self.model = blocks(count).to(self.bench.device)
        rows, length = (8, 1024) if not self.bench.quick else (2, 8)
        self.batch = torch.randn(rows, length, WIDTH, device=self.bench.device)

    def optimizer(self) -> torch.optim.Optimizer:
        """Return a new optimizer, so that every recording begins alike."""
        return torch.optim.AdamW(self.model.parameters(), lr=1e-5)

    def steps(self, optimizer: torch.optim.Optimizer, count: int) -> float:
        """Train, and return the seconds."""
        device = self.bench.device
        wait(device)
        start = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
                loss = self.model(self.batch).square().mean()
            loss.backward()
            optimizer.step()
        wait(device)
        return time.perf_counter() - start

    def pairs(self, recording: Callable[[torch.optim.Optimizer], Any]) -> Pairs:
        """Time steps that are recorded, after those that are checked in full, and plain ones, in turn."""
        first, timed = self.bench.size(FIRST_STEPS, 1), self.bench.size(TIMED_STEPS, 2)

        def recorded() -> float:
            optimizer = self.optimizer()
            with recording(optimizer):
                self.steps(optimizer, first)
                return self.steps(optimizer, timed)

        def plain() -> float:
            optimizer = self.optimizer()
            self.steps(optimizer, 3)
            return self.steps(optimizer, timed)

        return timed_pairs(recorded, plain, 0, 1 if self.bench.quick else 2, 3, 0)


def _training(bench: Bench, precision: Precision) -> Training:
    return bench.once(("gpt2", precision), lambda: Training(bench, precision))


def _last(training: Training) -> int:
    return len(list(training.model.children())) - 1


@row(
    "gpt2-keys",
    what="recording overhead after the first 20 steps, GPT-2-small-sized model in float32, the last 3072-wide layer's "
    "keys, float16, to disk",
    against="the same steps without recording",
    unit="percent",
    cuda=at_most(0.15),
    precision="float32",
    dtype="float16",
)
@row(
    "gpt2-keys-bfloat16",
    what="the same under bfloat16 autocast",
    against="the same steps without recording",
    unit="percent",
    cuda=REPORTED,
    precision="bfloat16",
    dtype="float16",
)
@row(
    "gpt2-keys-int8",
    what="the same under bfloat16 autocast, in int8",
    against="the same steps without recording",
    unit="percent",
    cuda=at_most(0.30),
    why={
        "cuda": "in this precision a step waits for the processor that launches it, and the writer's Python takes "
        "turns with it: of two machines of this kind one met the goal and one did not.",
    },
    precision="bfloat16",
    dtype="int8",
)
def keys_of_one_layer(bench: Bench, precision: Precision, dtype: Literal["float16", "int8"]) -> Measured:
    training = _training(bench, precision)

    @contextlib.contextmanager
    def recording(optimizer: torch.optim.Optimizer) -> Iterator[None]:
        layers: Any = {f"{_last(training)}.shrink": "keys"}
        with bench.scratch() as folder, dualform.record(training.model, optimizer, folder, layers=layers, dtype=dtype):
            yield

    return _overhead(bench, training.pairs(recording))


def _overhead(bench: Bench, pairs: Pairs) -> Measured:
    low, high = pairs.spread
    timed = bench.size(TIMED_STEPS, 2)
    return Measured(
        pairs.ratio - 1,
        (low - 1, high - 1),
        {
            "plain, ms per step": 1e3 * min(pairs.theirs) / timed,
            "recorded, ms per step": 1e3 * min(pairs.ours) / timed,
        },
    )


@row(
    "gpt2-block",
    what="rate to disk, GPT-2-small-sized model in bfloat16, keys and values of the last block, float16",
    against="the disk's own sequential write rate (the same bytes, synced every 128 MB)",
    unit="percent",
    cuda=at_least(0.8),
)
def one_block(bench: Bench) -> Measured:
    training = _training(bench, "bfloat16")
    steps = bench.size(TIMED_STEPS, 2)
    layers = [f"{_last(training)}.{name}" for name in LINEAR]
    written: list[int] = []
    content = torch.empty(0)

    def recorded() -> float:
        optimizer = training.optimizer()
        with bench.scratch() as folder:
            start = time.perf_counter()
            with dualform.record(training.model, optimizer, folder, layers=layers, dtype="float16"):
                training.steps(optimizer, steps)
            taken = time.perf_counter() - start
            written.append(bytes_of(folder))
        return taken

    def plain() -> float:
        nonlocal content
        if content.nbytes != written[-1] // 4 * 4:
            content = torch.randn(written[-1] // 4)
        with bench.scratch() as folder:
            folder.mkdir(parents=True)
            return write(folder, content)

    pairs = timed_pairs(recorded, plain, 0, 1 if bench.quick else 2, 3, 1)
    low, high = pairs.spread
    return Measured(
        1 / pairs.ratio,
        (1 / high, 1 / low),
        {
            "disk, MB/s": written[-1] / min(pairs.theirs) / 1e6,
            "recorder, MB/s": written[-1] / min(pairs.ours) / 1e6,
            "MB per step": written[-1] / steps / 1e6,
            "recorded, ms per step": 1e3 * min(pairs.ours) / steps,
        },
    )


class DroppingSink:
    """A sink that lets go of everything, on the device."""

    def __init__(self) -> None:
        self.steps = 0
        self.records: dict[int, CallRecord] = {}

    def open(self, start: Any) -> int:
        """Begin at step 0."""
        return 0

    def call(self, record: CallRecord) -> None:
        """Take a call's patterns."""
        self.records[record.number] = record

    def discard(self, backwards: Sequence[int]) -> None:
        """Let go of patterns."""
        gone = set(backwards)
        self.records = {number: one for number, one in self.records.items() if one.backward not in gone}

    def step(self, facts: StepFacts) -> None:
        """Count a step."""
        self.steps += 1

    def updates(self) -> Mapping[str, int]:
        """Return nothing: no run is continued."""
        return {}

    def find_step(self, parameters: Mapping[str, Tensor]) -> None:
        """Know no step."""

    def state(self) -> Mapping[str, Any]:
        """Return nothing."""
        return {}

    def _nothing(self, *_: Any) -> None:
        """Do nothing."""

    check = before_step = stepped = load_state = attach = flush = close = close_without_final = abandon = _nothing


class HostSink(DroppingSink):
    """A sink that brings every pattern to page-locked memory of the CPU, two steps at a time, and lets go of it."""

    def __init__(self) -> None:
        super().__init__()
        self.copier = HostCopier()
        self.copies: list[HostCopy] = []

    def step(self, facts: StepFacts) -> None:
        """Start to copy a step's patterns, when those of the step before the last have arrived."""
        super().step(facts)
        records = [self.records[call.number] for call in facts.calls]
        rows = [rows for record in records for rows in (record.keys, record.values) if rows is not None]
        if len(self.copies) == 2:
            self.copies.pop(0).wait()
        self.copies.append(self.copier.copy(rows))


ALL = "GPT-2-small-sized model, keys and values of every linear layer of all blocks"


@row(
    "gpt2-all-dropped",
    what=f"steps after the first 20, {ALL}, float32, into a sink that drops them on the device",
    against="the same steps without recording",
    cuda=at_most(1.2),
    precision="float32",
    sink=DroppingSink,
)
@row(
    "gpt2-all-dropped-bfloat16",
    what="the same under bfloat16 autocast",
    against="the same steps without recording",
    cuda=REPORTED,
    precision="bfloat16",
    sink=DroppingSink,
)
@row(
    "gpt2-all-host",
    what=f"steps after the first 20, {ALL}, float32, into page-locked memory of the CPU",
    against="the same steps without recording",
    cuda=at_most(2.5),
    precision="float32",
    sink=HostSink,
)
def all_blocks(bench: Bench, precision: Precision, sink: type[DroppingSink]) -> Measured:
    training = _training(bench, precision)
    layers = [f"*.{name}" for name in LINEAR]

    def recording(optimizer: torch.optim.Optimizer) -> Any:
        return dualform.Recorder(training.model, optimizer, sink(), layers=layers)

    pairs = training.pairs(recording)
    found = _overhead(bench, pairs)
    return Measured(pairs.ratio, pairs.spread, found.detail)
