"""Small good runs for the campaign of forgeries, each with a model that it can be asked with."""

import functools
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from torture.process_kills import record_in_two_processes

WIDE = 40  # keys that are wide enough for a pool
WORDS = 6


@dataclass(frozen=True, eq=False)
class GoodRun:
    """A recorded run to forge, and the model that was recorded."""

    name: str
    path: Path
    model: nn.Module
    queries: Mapping[str, Tensor]  # layer -> (2, d_in), what it is asked with
    by: tuple[str, ...] = ("label", "step")  # what totals are asked by
    train: Callable[[Any], nn.Module] | None = None  # of a run of steps: the training, to be run again


class _Mixed(nn.Module):
    """An embedding, a layer with a pool of keys, and a batch norm, whose statistics no layer covers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 3)
        self.first = nn.Linear(WIDE, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(7, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.first(inputs)).relu()
        tokens = inputs[:, 0].abs().mul(10).long() % WORDS
        found: Tensor = self.last(torch.cat([hidden, self.table(tokens)], dim=1))
        return found


def _plain() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


def _convolved() -> nn.Module:
    """Return a network whose convolution has its inputs stored in place of its keys."""
    return nn.Sequential(nn.Unflatten(1, (2, 4, 5)), nn.Conv2d(2, 3, 3, padding=1), nn.Flatten(), nn.Linear(60, 3))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _warm_adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that has taken a step already, so that a run keeps its state."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _record(
    path: Path,
    make: Callable[[], nn.Module],
    optimize: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    width: int,
    steps: int = 4,
    text: bool = False,
    attached: bool = False,
    shard_bytes: int = 700,
    **options: Any,
) -> GoodRun:
    """Record a run of a few steps, two shards at least, with samples and labels."""
    inputs = torch.randn(12, width, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(12) % 3

    def train(recording: Callable[..., Any]) -> nn.Module:
        torch.manual_seed(0)
        model = make()
        optimizer = optimize(model)
        with recording(model, optimizer) as recorder:
            for step in range(steps):
                rows = (torch.arange(6) + 6 * (step % 2)) % 12
                columns: dict[str, Any] = {
                    "sample": rows,
                    "label": labels[rows],
                    "task": "early" if step < 2 else "late",
                }
                if text:
                    columns |= {"place": rows, "token": rows % WORDS, "weight": rows * 0.5}
                recorder.annotate(**columns)
                optimizer.zero_grad()
                functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
                optimizer.step()
        return model

    model = train(functools.partial(dualform.record, path=path, shard_bytes=shard_bytes, **options))
    memory = dualform.open(path)
    if attached:
        memory.add_tests(inputs[:3], labels[:3], images=torch.zeros(3, 4, 4, dtype=torch.uint8))
        memory.add_media(
            images=torch.zeros(12, 4, 4, dtype=torch.uint8), labels=["cat", "dog", "fox"], mean=0, deviation=1
        )
    if text:
        memory.add_corpus(
            dualform.Corpus.from_tokens(torch.arange(12) % WORDS, vocabulary=list("abcdef"), unit="chars")
        )
    queries = {
        name: torch.arange(2)[:, None] if "rows" in entry.parameters else torch.randn(2, entry.d_in)
        for name, entry in memory.layers.items()
    }
    shutil.rmtree(path / "cache", ignore_errors=True)
    keep = options.get("keep")
    by = ("label",) if isinstance(keep, dualform.Shares) else ("label", "step")
    return GoodRun(path.name, path, model, queries, by, train if keep == dualform.Steps() else None)


def _record_together(path: Path, options: dict[str, Any]) -> GoodRun:
    """Record a run of two processes."""
    model = record_in_two_processes(path, options)
    memory = dualform.open(path)
    queries = {name: torch.randn(2, entry.d_in) for name, entry in memory.layers.items()}
    by = ("label",) if "keep" in options else ("label", "step")
    return GoodRun(path.name, path, model, queries, by)


def make_good_runs(folder: Path, *, few: bool) -> list[GoodRun]:
    """Record the good runs below a folder; `few` of them where time is short."""
    found = [
        _record(folder / "sgd", _plain, _sgd, width=5, attached=True),
        _record(folder / "mixed", _Mixed, _sgd, width=WIDE, shard_bytes=2500),
        _record(folder / "adam", _plain, _adam, width=5, text=True),
    ]
    if few:
        return found
    by_label = dualform.Shares(by="label", at=[2])
    of_inputs = _record(folder / "convolved", _convolved, _sgd, width=WIDE, shard_bytes=2500)
    several = dualform.Shares(by=[["label"], [dualform.bins("step", 2)]], groups=3, rest=True)
    return [
        *found,
        of_inputs,
        _record(folder / "warm", _plain, _warm_adam, width=5),
        _record(folder / "float16", _plain, _sgd, width=5, dtype="float16"),
        _record(folder / "int8", _plain, _sgd, width=5, dtype="int8"),
        _record(folder / "keys", _plain, _adam, width=5, layers={"*": "keys"}),
        _record(folder / "shares", _plain, _adam, width=5, attached=True, keep=by_label),
        _record(folder / "groupings", _Mixed, _sgd, width=WIDE, shard_bytes=2500, keep=several),
        _record(folder / "steps", _plain, _adam, width=5, keep=dualform.Steps()),
        _record_together(folder / "ranks", {"shard_bytes": 700}),
        _record_together(folder / "rank shares", {"shard_bytes": 700, "keep": by_label}),
    ]
