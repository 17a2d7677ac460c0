"""What recording adds to small programs of the kinds that people write, to disk and with annotations."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from benchmarks.bench import Bench
from benchmarks.rows import REPORTED, Measured, at_most, row
from benchmarks.timing import of_steps, timed_pairs, wait

AGAINST = "the same program without recording"
WARM = 5  # steps at the beginning that the row's own figure leaves out
FIRST = 60  # steps from the very first on, whose ratio is a detail of the row
WHY = {
    "language": "a step of two threads on two cores: what the training thread spends inside of the recorder is in the "
    "details, and the writer takes a core meanwhile, to find ranges of keys, copy, sum and write.",
    "cnn": "a small step, two thirds of which run on two threads: recording's samples, its copies of errors, which lie "
    "channel by channel, and the writer take the rest. Full checks unfold the inputs in each of the first 20 steps.",
    "lstm": "reading the gates' errors out of the kernel's workspace takes a dozen passes over them.",
    "reinforce": "64 calls of one row: torch's own calling of hooks, a hook on each output, and Python objects for "
    "each call, its errors and its place. The writer's Python takes turns with the program's.",
}
"""Why each program misses its goal on a CPU."""


@dataclass(frozen=True, slots=True)
class Program:
    """A training: the model, its optimizer, and a generator that makes one optimizer step each time it is advanced."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    steps: Callable[[Any], Iterator[None]]  # takes the recorder, or None


class Decoder(nn.Module):
    """A character model in the manner of nanoGPT: two pre-norm blocks, learned positions."""

    def __init__(self, tokens: int = 65, width: int = 128, length: int = 64) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(tokens, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, tokens)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, L) -> (B, L, tokens)
        """Return the logits of the next character."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        places = torch.arange(length, device=tokens.device)
        stream = self.tokens(tokens) + self.positions(places)
        logits: Tensor = self.head(self.blocks(stream, mask=mask, is_causal=True))
        return logits


def language(device: torch.device) -> Program:
    """Train a two-layer Transformer on 16 windows of 64 characters a step, with AdamW and clipping."""
    model = Decoder().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.randint(65, (4096,), generator=torch.Generator().manual_seed(0))

    def steps(recorder: Any) -> Iterator[None]:
        generator = torch.Generator().manual_seed(1)
        while True:
            starts = torch.randint(len(text) - 65, (16,), generator=generator)
            windows = torch.stack([text[start : start + 65] for start in starts.tolist()])
            if recorder is not None:
                recorder.annotate(sample=starts)
            windows = windows.to(device)
            logits = model(windows[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            yield

    return Program(model, optimizer, steps)


def convolutional(device: torch.device) -> Program:
    """Train two convolutions and two linear layers on 64 images of 28 × 28 a step, with SGD and momentum."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return _classifying(model, optimizer, torch.randn(512, 1, 28, 28), 64, device)


class Recurrent(nn.Module):
    """An LSTM over a sequence, and a linear layer on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 128, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, sequence: Tensor) -> Tensor:  # (B, L, 32) -> (B, 10)
        """Return the logits of a sequence's class."""
        logits: Tensor = self.head(self.lstm(sequence)[0][:, -1])
        return logits


def recurrent(device: torch.device) -> Program:
    """Train an LSTM of 128 units on 32 sequences of 40 a step, with Adam."""
    model = Recurrent().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return _classifying(model, optimizer, torch.randn(512, 40, 32), 32, device)


def _classifying(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, rows: int, device: torch.device
) -> Program:
    labels = torch.arange(len(inputs)) % 10
    there, targets = inputs.to(device), labels.to(device)

    def steps(recorder: Any) -> Iterator[None]:
        generator = torch.Generator().manual_seed(1)
        while True:
            batch = torch.randint(len(inputs), (rows,), generator=generator)
            if recorder is not None:
                recorder.annotate(sample=batch, label=labels[batch])
            at = batch.to(device)
            loss = functional.cross_entropy(model(there[at]), targets[at])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield

    return Program(model, optimizer, steps)


def reinforce(device: torch.device) -> Program:
    """Train a policy by REINFORCE: 32 calls of one row each, then one backward through all of them."""
    model = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 2)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def steps(recorder: Any) -> Iterator[None]:
        generator = torch.Generator().manual_seed(1)
        episode = 0
        while True:
            state = torch.zeros(1, 4, device=device)
            losses = []
            for moment in range(32):
                if recorder is not None:
                    recorder.annotate(episode=episode, moment=moment)
                logits = torch.log_softmax(model(state), dim=1)
                action = int(torch.rand((), generator=generator) < float(logits[0, 1].detach().exp()))
                losses.append(-logits[0, action] * (1 + moment % 3))
                state = 0.9 * state + 0.1 * (2 * action - 1)
            optimizer.zero_grad()
            torch.stack(losses).sum().backward()
            optimizer.step()
            episode += 1
            yield

    return Program(model, optimizer, steps)


@row(
    "programs-language",
    what="recording a character Transformer of two layers (AdamW, 16 × 64 characters a step), all layers, to disk",
    against=AGAINST,
    cpu=at_most(1.5),
    cuda=REPORTED,
    why=WHY["language"],
    make=language,
    steps=300,
)
@row(
    "programs-cnn",
    what="the same, a CNN of two convolutions (SGD, 64 images of 28 × 28 a step)",
    against=AGAINST,
    cpu=at_most(1.5),
    cuda=REPORTED,
    why=WHY["cnn"],
    make=convolutional,
    steps=300,
)
@row(
    "programs-lstm",
    what="the same, an LSTM of 128 units (Adam, 32 sequences of 40 a step)",
    against=AGAINST,
    cpu=at_most(1.5),
    cuda=REPORTED,
    why=WHY["lstm"],
    make=recurrent,
    steps=300,
)
@row(
    "programs-reinforce",
    what="the same, REINFORCE: 32 calls of one row and one backward a step",
    against=AGAINST,
    cpu=at_most(1.5),
    cuda=REPORTED,
    why=WHY["reinforce"],
    make=reinforce,
    steps=300,
)
def programs(bench: Bench, make: Callable[[torch.device], Program], steps: int) -> Measured:
    """Train for some steps, recorded to disk and not, in turn.

    The row counts the steps of a training after its first few, which warm up. What recording costs at the beginning,
    where every step is checked in full and rows are tried again and again, is in the details: there the first steps
    count from the very first on, which copies the model to try its rows.
    """
    count, warm, first = bench.size(steps, 1), bench.size(WARM, 0), bench.size(FIRST, 1)
    beginnings: tuple[list[float], list[float]] = ([], [])  # seconds of the first steps: recorded, plain

    inside: list[float] = []

    def run(program: Program, recorder: Any, which: int) -> float:
        going = program.steps(recorder)
        ends = []
        wait(bench.device)
        begin = time.perf_counter()
        for number in range(warm + count):
            next(going)
            if number + 1 in (warm, first):
                wait(bench.device)
            ends.append(time.perf_counter())
            if recorder is not None:
                inside.append(recorder.overhead)
        wait(bench.device)
        end = time.perf_counter()
        beginnings[which].append(ends[first - 1] - begin)
        return end - (ends[warm - 1] if warm else begin)

    def fresh() -> Program:
        torch.manual_seed(0)
        return make(bench.device)

    def recorded() -> float:
        program = fresh()
        with bench.scratch() as folder, dualform.record(program.model, program.optimizer, folder) as recorder:
            return run(program, recorder, 0)

    def plain() -> float:
        return run(fresh(), None, 1)

    times = (0, 1, 1, 0) if bench.quick else (20, 3, 15, 1)
    pairs = timed_pairs(recorded, plain, *times)
    return Measured(
        pairs.ratio,
        pairs.spread,
        {
            "steps": count,
            "plain, ms per step": 1e3 * min(pairs.theirs) / count,
            "recorded, ms per step": 1e3 * min(pairs.ours) / count,
            f"ratio of the first {first} steps": min(beginnings[0]) / min(beginnings[1]),
            "median of the pairs' ratios": pairs.median,
            "ratio of processor times": pairs.processor,
            **of_steps(inside),
        },
    )
