"""The small models, optimizers and batches that the golden runs were recorded with, and the questions asked of them.

`make.py` records the runs and writes the answers down; `test_golden_runs.py` opens them and asks again.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import dualform

FOLDER = Path(__file__).parent / "version1"
ANSWERS = FOLDER / "answers.json"
STEPS, B, L, D = 6, 4, 3, 4
CLASSES = 3


class Convolved(nn.Module):
    """Convolutions, one of them in groups, a batch normalisation and a group normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Conv1d(D, D, 2, padding=1, bias=False)
        self.grouped = nn.Conv2d(2, 4, 2, groups=2)
        self.batch_norm = nn.BatchNorm2d(4)
        self.group_norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Take (B, L, D)."""
        line = self.line(x.transpose(1, 2))  # (B, D, L + 1)
        image = line.reshape(len(x), 2, 2, L + 1)
        return self.head(self.group_norm(self.batch_norm(self.grouped(image)).tanh()).mean(dim=(2, 3)))


class Tokens(nn.Module):
    """A table, tied to the output layer where asked, layer and root-mean-square normalisations."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(5, D, padding_idx=0)
        self.norm = nn.LayerNorm(D)
        self.rms = nn.RMSNorm(D, eps=1e-6)
        self.head = nn.Linear(D, 5)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        """Take (B, L, D), of which the first elements choose tokens."""
        tokens = (x[..., 0].abs() * 3).long() % 5
        return self.head(self.rms(self.norm(self.table(tokens)).tanh()))


class Recurrent(nn.Module):
    """A recurrent module, a cell, and a head."""

    def __init__(self, layer: nn.RNNBase, cell: nn.RNNCellBase) -> None:
        super().__init__()
        self.layer = layer
        self.cell = cell
        self.head = nn.Linear(cell.hidden_size, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Take (B, L, D)."""
        hidden = self.cell(self.layer(x)[0][:, -1])
        return self.head(hidden[0] if isinstance(hidden, tuple) else hidden)


class Attending(nn.Module):
    """Self-attention, attention to other keys and values, and attention between widths that differ."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attention = nn.MultiheadAttention(D, 2, batch_first=True)
        self.cross_attention = nn.MultiheadAttention(D, 2, batch_first=True)
        self.mixed_attention = nn.MultiheadAttention(D, 2, kdim=3, vdim=2, batch_first=True)
        self.head = nn.Linear(D, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Take (B, L, D)."""
        found = self.self_attention(x, x, x)[0]
        found = self.cross_attention(found, x, x)[0]
        return self.head(self.mixed_attention(found, x[..., :3], x[..., :2])[0].mean(dim=1))


class _Conv1D(nn.Module):
    """What transformers calls Conv1D: a linear layer with its weight stored the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D) / 2)
        self.bias = nn.Parameter(torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        """Return x W + b."""
        return torch.addmm(self.bias, x.view(-1, D), self.weight).view(*x.shape[:-1], D)


_Conv1D.__module__, _Conv1D.__name__ = "transformers.pytorch_utils", "Conv1D"


def _mlp(d_in: int = D) -> nn.Module:
    return nn.Sequential(nn.Linear(d_in, 5), nn.ReLU(), nn.Linear(5, CLASSES))


def _sgd(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)]


def _adam(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-3)]


def _muon(model: nn.Module) -> list[Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return [
        torch.optim.Muon(matrices, lr=1e-2),
        torch.optim.AdamW([p for p in model.parameters() if p.dim() != 2], lr=1e-2),
    ]


@dataclass(frozen=True)
class Recipe:
    """How one golden run was recorded."""

    model: Callable[[], nn.Module]
    optimizers: Callable[[nn.Module], list[Optimizer]] = _sgd
    options: dict[str, Any] = field(default_factory=dict)
    flat: bool = False  # whether the model takes (B, width) instead of (B, L, width)
    width: int = D  # of an input
    samples: int = STEPS * B  # of which each step sees the next B, in a circle


RECIPES: dict[str, Recipe] = {
    "linear-sgd-pooled": Recipe(lambda: _mlp(32), flat=True, width=32, samples=8),
    "linear-muon": Recipe(_mlp, _muon, flat=True),
    "linear-float16": Recipe(_mlp, flat=True, options={"dtype": "float16"}),
    "linear-keys-only": Recipe(_mlp, flat=True, options={"layers": {"0": "keys", "*": "keys+values"}}),
    "transposed-sgd": Recipe(lambda: nn.Sequential(nn.Linear(D, D), _Conv1D(), nn.Linear(D, CLASSES)), flat=True),
    "transposed-adam": Recipe(
        lambda: nn.Sequential(nn.Linear(D, D), _Conv1D(), nn.Linear(D, CLASSES)), _adam, flat=True
    ),
    "convolutions-sgd": Recipe(Convolved),
    "convolutions-adam": Recipe(Convolved, _adam),
    "tokens-sgd": Recipe(lambda: Tokens(tied=False)),
    "tokens-tied-adam": Recipe(lambda: Tokens(tied=True), _adam),
    "lstm-sgd": Recipe(lambda: Recurrent(nn.LSTM(D, 3, batch_first=True, bidirectional=True), nn.LSTMCell(6, 2))),
    "lstm-adam": Recipe(lambda: Recurrent(nn.LSTM(D, 3, batch_first=True), nn.RNNCell(3, 2)), _adam),
    "gru-sgd": Recipe(lambda: Recurrent(nn.GRU(D, 3, batch_first=True, bidirectional=True), nn.GRUCell(6, 2))),
    "gru-muon": Recipe(lambda: Recurrent(nn.GRU(D, 3, batch_first=True), nn.GRUCell(3, 2, bias=False)), _muon),
    "attention-sgd": Recipe(Attending),
    "attention-adam": Recipe(Attending, _adam),
}


def batches(recipe: Recipe) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return each step's inputs, labels and sample numbers, and one more batch to ask about."""
    generator = torch.Generator().manual_seed(1)
    shape = (recipe.samples + B, recipe.width) if recipe.flat else (recipe.samples + B, L, recipe.width)
    data = torch.randn(*shape, generator=generator, dtype=torch.float64).float() + 0.3
    numbers = [torch.arange(step * B, (step + 1) * B) % recipe.samples for step in range(STEPS)]
    numbers.append(torch.arange(recipe.samples, recipe.samples + B))
    return [(data[n], n % CLASSES, n) for n in numbers]


def make_model(recipe: Recipe) -> nn.Module:
    """Return the model as it was before its training."""
    torch.manual_seed(0)
    return recipe.model()


def record(path: Path, recipe: Recipe, *, first: int = 0, model: nn.Module | None = None, **options: Any) -> nn.Module:
    """Record a run from step `first` on, and return the trained model."""
    model = make_model(recipe) if model is None else model
    optimizers = recipe.optimizers(model)
    with dualform.record(model, optimizers, path, **(recipe.options | options)) as recorder:
        for x, labels, samples in batches(recipe)[first:-1]:
            recorder.annotate(label=labels, sample=samples)
            for optimizer in optimizers:
                optimizer.zero_grad()
            output = model(x)
            target = torch.arange(output.shape[-1], dtype=output.dtype) - 1
            (output - target).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
            if samples[0] + B == recipe.samples:  # an epoch is over: publish a shard
                recorder.flush()
    return model


def ask(path: Path, recipe: Recipe) -> dict[str, Any]:
    """Return the answers of a run as lists of numbers, by question."""
    memory = dualform.open(path)
    model = memory.trained(make_model(recipe)).eval()
    inputs = batches(recipe)[-1][0][:1]
    spotlight = memory.attend(model, inputs, quantity=lambda outputs, targets: outputs.flatten(1)[:, 0])
    verification = memory.verify()
    answers: dict[str, Any] = {
        "passed": verification.passed,
        "errors": {layer.layer: layer.error for layer in verification.layers},
        "patterns": {layer.layer: layer.patterns for layer in verification.layers},
        "weights": {name: numbers(tensor) for name, tensor in memory.weights().items()},
        "without": {name: numbers(tensor) for name, tensor in memory.without(label=1).weights().items()},
        "outside": spotlight.outside(),
    }
    for name, entry in memory.layers.items():
        answers[f"layer {name}"] = found = _ask_layer(spotlight[name], values=entry.store != "keys")
        if name not in answers["outside"] and entry.store != "keys":
            source = dataclasses.replace(spotlight[name]._require_asked(), filtering="layerwise")  # as it was then
            found["effects"] = numbers(source.totals(spotlight[name]._group("sample")))
    return answers


def _ask_layer(layer: Any, *, values: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for of in ("attention", "magnitude", "contribution") if values else ("attention", "magnitude"):
        found[f"totals of {of}"] = numbers(layer.totals("label", of=of).values)
        top = layer.top(2, of=of, **({"unit": 0} if of == "contribution" else {}))
        found[f"top of {of}"] = numbers(top.values)
        found[f"patterns of top of {of}"] = numbers(top.patterns)
    if values:
        found["output"] = numbers(layer.output())
        found["contributions"] = numbers(layer.contributions().sum(dim=1))
    return found


def numbers(tensor: Tensor) -> list[float | None]:
    """Return a tensor's elements as a list that JSON can hold: to nine digits, None where they are not finite."""
    return [float(f"{x:.9g}") if math.isfinite(x) else None for x in tensor.reshape(-1).tolist()]
