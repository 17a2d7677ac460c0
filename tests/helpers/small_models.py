"""Small models that a run can remember by name; and for letters a text to train on that is full of markup."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dualform

NASTY = '<script>window.hacked=1</script><img src=x onerror="window.hacked=1">&amp;\''
STORY = ("the fox saw the grapes and the crow saw the fox. " + NASTY + " the grapes were sour. ") * 6
VOCABULARY = sorted(set(STORY))
LENGTH = 12


class Letters(nn.Module):
    """Predicts the next letter from the one before."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(size, 8)
        self.out = nn.Linear(8, size)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, L) -> (B, L, V)
        logits: Tensor = self.out(torch.tanh(self.table(tokens)))
        return logits


def letters(size: int) -> Letters:
    return Letters(size)


def record_letters(folder: Path, steps: int = 30) -> Letters:
    """Record a run of letters that keeps its text, its documents and some tests."""
    torch.manual_seed(0)
    tokens = torch.tensor([VOCABULARY.index(letter) for letter in STORY])
    model = letters(len(VOCABULARY))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    size = {"size": len(VOCABULARY)}
    with dualform.record(
        model, optimizer, folder, factory="helpers.small_models:letters", factory_arguments=size
    ) as recorder:
        recorder.media(tokens=tokens, vocabulary=VOCABULARY, documents=[(0, NASTY), (len(STORY) // 2, "Second")])
        starts = torch.arange(0, 8 * LENGTH, LENGTH)
        tests = torch.stack([tokens[start : start + LENGTH] for start in starts.tolist()])
        recorder.tests(tests, tokens[starts + LENGTH])
        for step in range(steps):
            place = (torch.arange(4)[:, None] * 37 + step * 5 + torch.arange(LENGTH)) % (len(STORY) - 1)
            recorder.annotate(place=place, token=tokens[place])
            loss = nn.functional.cross_entropy(model(tokens[place]).flatten(0, 1), tokens[place + 1].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


class Pictures(nn.Module):
    """Two convolutions and a linear layer, on images of 6 × 6 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 3, 3)
        self.second = nn.Conv2d(3, 4, 2)
        self.last = nn.Linear(4 * 9, 3)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:  # (B, 1, 6, 6) -> (B, 3)
        logits: Tensor = self.last(self.relu(self.second(self.relu(self.first(x)))).flatten(1))
        return logits


def pictures() -> Pictures:
    return Pictures()


def record_pictures(folder: Path, *, annotate: bool = True, **options: Any) -> Pictures:
    """Record a convolutional network, with tests but without images."""
    torch.manual_seed(0)
    model = pictures()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(60, 1, 6, 6)
    labels = inputs.flatten(1)[:, :3].argmax(dim=1)
    with dualform.record(model, optimizer, folder, factory="helpers.small_models:pictures", **options) as recorder:
        recorder.tests(inputs[:9], labels[:9])
        for step in range(12):
            rows = torch.arange(5) + 4 * step
            if annotate:
                recorder.annotate(sample=rows, label=labels[rows])
            loss = nn.functional.cross_entropy(model(inputs[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def small_classifier() -> nn.Module:
    """Four numbers in, three classes out."""
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
