"""Does a memory of steps answer as a stored one on this device? `python -m benchmarks.replay_equality --device cuda`.

Four networks, three optimizers. Every question of README is asked of a stored memory of a training, and of a memory of
its steps alone: once with its patterns held after one replay, once while the training goes by them. Printed is, for
each, the largest difference relative to the largest element of an answer. On a GPU torch has to be deterministic.
"""

import argparse
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from dualform.replaying.replay_executor import ReplayExecutor
from dualform.replaying.replayed_patterns import ReplayedPatterns
from dualform.store.reader import Run

STEPS, ROWS, LENGTH, LETTERS, CLASSES = 12, 16, 8, 11, 5
TOLERANCE = 1e-4
"""Largest difference, relative to the largest element of an answer: float32 sums in another order."""


class Convolutional(nn.Module):
    """Two convolutions and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3, stride=2)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:  # (B, 64) -> (B, C)
        """Return the logits."""
        seen = functional.relu(self.second(functional.relu(self.first(x.view(-1, 1, 8, 8)))))
        logits: Tensor = self.head(seen.flatten(1))
        return logits


class Recurrent(nn.Module):
    """Letters, an LSTM and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm = nn.Embedding(LETTERS, 8), nn.LSTM(8, 12, batch_first=True)
        self.head = nn.Linear(12, LETTERS)

    def forward(self, x: Tensor) -> Tensor:  # (B, L) -> (B, L, V)
        """Return the logits of the next letters."""
        logits: Tensor = self.head(self.lstm(self.table(x))[0])
        return logits


class Attentive(nn.Module):
    """Letters, places, one block of attention, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(LETTERS, 16), nn.Embedding(LENGTH, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, LETTERS)

    def forward(self, x: Tensor) -> Tensor:  # (B, L) -> (B, L, V)
        """Return the logits of the next letters."""
        stream = self.table(x) + self.places(torch.arange(x.shape[1], device=x.device))
        logits: Tensor = self.head(self.block(stream))
        return logits


def digits() -> nn.Module:
    """Return three linear layers."""
    return nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, CLASSES))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "digits": digits,
    "CNN": Convolutional,
    "LSTM": Recurrent,
    "Transformer": Attentive,
}
OPTIMIZERS: dict[str, Callable[[nn.Module], list[torch.optim.Optimizer]]] = {
    "SGD": lambda model: [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)],
    "AdamW": lambda model: [torch.optim.AdamW(model.parameters(), lr=0.01)],
    "Muon": lambda model: [
        torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=1e-2),
        torch.optim.AdamW([p for p in model.parameters() if p.dim() != 2], lr=1e-2),
    ],
}


def batch(kind: str, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the inputs of a step and their labels (B,), or the next letters (B, L)."""
    generator = torch.Generator().manual_seed(step)
    if kind in ("digits", "CNN"):
        inputs = torch.randn(ROWS, 64, generator=generator)
        return inputs.to(device), inputs[:, :CLASSES].argmax(dim=1).to(device)
    letters = torch.randint(LETTERS, (ROWS, LENGTH + 1), generator=generator).to(device)
    return letters[:, :-1], letters[:, 1:]


def training(kind: str, optimizer: str, device: torch.device) -> Callable[[Any], nn.Module]:
    """Return a training as a function."""

    def train(recording: Any) -> nn.Module:
        torch.manual_seed(0)
        model = MODELS[kind]().to(device)
        optimizers = OPTIMIZERS[optimizer](model)
        with recording(model, optimizers) as recorder:
            for step in range(STEPS):
                inputs, labels = batch(kind, step, device)
                recorder.annotate(
                    sample=(torch.arange(ROWS) + 3 * step) % 40, epoch=step // 4, label=labels.cpu().numpy()
                )
                for one in optimizers:
                    one.zero_grad()
                functional.cross_entropy(model(inputs).flatten(0, -2), labels.flatten()).backward()
                for one in optimizers:
                    one.step()
        return model

    return train


def answers(memory: dualform.Memory, model: nn.Module, kind: str, device: torch.device) -> dict[str, Any]:
    """Return the answers to the questions of README, by name."""
    inputs, targets = batch(kind, 1000, device)
    plain = targets.dim() == 1
    spotlight = memory.attend(model, inputs, targets=targets if plain else None)
    found: dict[str, Any] = {"verified": memory.verify(model).passed, "weights": memory.weights()}
    totals, best = spotlight.compute(dualform.Totals(by="label"), dualform.Top(3))
    for name in memory.layers:
        found[f"totals {name}"], found[f"top {name}"] = totals[name].values, best[name].values
    layer = spotlight[list(memory.layers)[-1]]
    found |= {
        "attention": layer.attention(),
        "magnitude": layer.totals("label", of="magnitude").values,
        "contributions": layer.totals(["epoch", dualform.bins("step", width=4)], of="contribution").values,
        "output": layer.output(),
        "start": layer.start(),
        "top contributions": layer.top(2, of="contribution", per="pattern").values,
        "top samples": layer.top(2, by="label", per="sample").values,
        "vote": spotlight.vote(by="label").winners,
        "masked": memory.without(sample=[1, 2]).weights(),
        "shares": memory.without(epoch=0).shares(),
        "earlier": memory.at(step=3).weights(),
    }
    if plain:
        found["effects"] = spotlight.effects(by="label").values
        found["path"] = spotlight.path_contributions(by="label").values
    return found


def difference(found: Any, expected: Any) -> float:
    """Return the largest difference of two answers, relative to the largest element; infinity where they differ."""
    if isinstance(expected, Tensor):
        if found.shape != expected.shape:
            return float("inf")
        scale = max(float(expected.nan_to_num().abs().max()), 1e-6) if expected.numel() else 1.0
        apart = (found.cpu().double() - expected.cpu().double()).nan_to_num().abs()
        return float(apart.max()) / scale if apart.numel() else 0.0
    if isinstance(expected, dict) and all(isinstance(one, Tensor) for one in expected.values()):
        return max((difference(found[name], one) for name, one in expected.items()), default=0.0)
    return 0.0 if found == expected else float("inf")


def compare(kind: str, optimizer: str, device: torch.device, folder: Path) -> float:
    """Compare the answers of all three memories of one training, print the differences, and return the largest."""
    start = time.perf_counter()
    train = training(kind, optimizer, device)
    model = dualform.record_training(train, folder / "steps")
    dualform.record_training(train, folder / "patterns", keep=dualform.Patterns())
    expected = answers(dualform.open(folder / "patterns"), model, kind, device)
    worst: list[float] = []
    for held_bytes in (1 << 30, 0):
        source = ReplayedPatterns(Run(folder / "steps"), train, held_bytes=held_bytes)
        found = answers(dualform.Memory(source, ReplayExecutor()), model, kind, device)
        apart = {name: difference(found[name], answer) for name, answer in expected.items()}
        name = max(apart, key=lambda one: apart[one])
        worst.append(apart[name])
        how = "held" if held_bytes else "going by"
        equal = sum(size == 0.0 for size in apart.values())
        print(
            f"{kind:12} {optimizer:6} {how:9} {equal:2} of {len(apart)} answers equal to the bit, "
            f"largest difference {apart[name]:.1e} ({name}), {source.replays} replays",
            flush=True,
        )
        for path in sorted((folder / "steps" / "cache").glob("*")):
            path.unlink()
    print(f"{'':30}{time.perf_counter() - start:.1f} s", flush=True)
    return max(worst)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, and return 1 where an answer differs by more than rounding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=list(OPTIMIZERS))
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    warnings.simplefilter("ignore")  # of layers whose rows are not the batch's
    torch.use_deterministic_algorithms(True)
    worst = 0.0
    for kind in options.models:
        for optimizer in options.optimizers:
            with tempfile.TemporaryDirectory() as folder:
                worst = max(worst, compare(kind, optimizer, device, Path(folder)))
    print(f"largest difference {worst:.1e}; allowed {TOLERANCE:.0e}")
    return int(not worst <= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
