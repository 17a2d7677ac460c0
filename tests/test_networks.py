"""Real small networks, trained until they have learned something: everything is covered, and everything verifies."""

import codecs
import contextlib
import io
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import dualform


def _zen() -> str:
    """Return a short English text that every Python has."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    return codecs.decode(this.s, "rot13")


ZEN = _zen()
LETTERS = sorted(set(ZEN))
TOKENS = torch.tensor([LETTERS.index(letter) for letter in ZEN])
ROWS, LENGTH = 8, 24


class Characters(nn.Module):
    """An LSTM language model."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(len(LETTERS), 16)
        self.lstm = nn.LSTM(16, 32, num_layers=2, dropout=0.1, batch_first=True)
        self.output = nn.Linear(32, len(LETTERS))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each next token, (B, L, letters)."""
        return self.output(self.lstm(self.table(tokens))[0])


class Block(nn.Module):
    """A decoder-only Transformer of one block; the table is also the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(len(LETTERS), 32)
        self.places = nn.Embedding(LENGTH, 32)
        self.first = nn.LayerNorm(32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.second = nn.LayerNorm(32)
        self.wide = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.output = nn.Linear(32, len(LETTERS), bias=False)
        self.output.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each next token, (B, L, letters)."""
        length = tokens.shape[1]
        x = self.table(tokens) + self.places(torch.arange(length).expand(tokens.shape))
        before = self.first(x)
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = x + self.attention(before, before, before, attn_mask=mask, need_weights=False, is_causal=True)[0]
        x = x + self.wide(self.second(x))
        return self.output(x)


def passages(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, the tokens after them, and their places in the text, (B, L) each."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(TOKENS) - LENGTH - 1, (ROWS, 1), generator=generator)
    places = starts + torch.arange(LENGTH)
    return TOKENS[places], TOKENS[places + 1], places


@pytest.mark.mostly_slow(fast=1)
@pytest.mark.parametrize("make", [Characters, Block])
def test_a_language_model(tmp_path: Path, make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    losses = []
    with dualform.record(model, optimizer, tmp_path / "run", strict=True) as recorder:
        for step in range(150):
            tokens, following, places = passages(step)
            recorder.annotate(place=places, token=[[LETTERS[i] for i in row] for row in tokens.tolist()])
            loss = functional.cross_entropy(model(tokens).flatten(0, 1), following.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    assert sum(losses[-10:]) / 10 < 0.7 * math.log(len(LETTERS))  # it has learned
    memory = dualform.open(tmp_path / "run")
    found = memory.verify(model)
    assert found.passed, found
    assert memory.info().uncovered == {}
    patterns = {layer.layer: layer.patterns for layer in found.layers}
    assert set(patterns.values()) == {150 * ROWS * LENGTH}
    model.eval()
    tokens, _, _ = passages(999)
    name = "lstm.l1" if make is Characters else "attention.in_proj"
    top = memory.attend(model, tokens[:1], layers=[name])[name].top(3)
    assert set(top.columns["token"]) <= set(LETTERS)  # annotated by row and position


def warm(optimizer: Optimizer, steps: int) -> SequentialLR:
    """Return a schedule that warms up and then follows a cosine."""
    up = LinearLR(optimizer, start_factor=0.05, total_iters=steps // 10)
    return SequentialLR(optimizer, [up, CosineAnnealingLR(optimizer, steps)], milestones=[steps // 10])


@pytest.mark.slow
def test_an_mlp_with_adamw_and_a_warm_up_cosine(tmp_path: Path) -> None:
    torch.manual_seed(0)
    bunch = load_digits()
    images, labels = torch.tensor(bunch.data, dtype=torch.float32) / 16, torch.tensor(bunch.target)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = AdamW(model.parameters(), lr=5e-3, weight_decay=0.05)
    schedule = warm(optimizer, 300)
    with dualform.record(model, optimizer, tmp_path / "run", strict=True) as recorder:
        for step in range(300):
            rows = torch.randint(1500, (32,), generator=torch.Generator().manual_seed(step))
            recorder.annotate(sample=rows, label=labels[rows])
            optimizer.zero_grad()
            functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        assert float((model(images[1500:]).argmax(1) == labels[1500:]).float().mean()) > 0.85
    memory = dualform.open(tmp_path / "run")
    assert memory.verify(model).passed
    votes = memory.attend(model, images[1500:1600])["2"].totals(by="label", of="contribution").values
    assert votes.shape == (100, 10, 10)
