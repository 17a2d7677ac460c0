"""Every question is asked in eval mode, and the model's modes are afterwards what they were."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from dualform.effects.slopes import slopes
from dualform.modes import evaluating, evaluation_copy
from dualform.show.predictions import predict_units
from dualform.show.session import Session


class Unruly(nn.Module):
    """A classifier whose `train` trains it, so that `model.eval()` raises; a part of it is in eval mode always."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 16)
        self.frozen = nn.BatchNorm1d(16)
        self.frozen.training = False
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(16, 3)

    def forward(self, inputs: Tensor) -> Any:
        return self.last(self.drop(self.frozen(self.first(inputs)).relu()))

    def train(self, inputs: Tensor, labels: Tensor, optimizer: torch.optim.Optimizer) -> None:  # type: ignore[override]
        optimizer.zero_grad()
        functional.cross_entropy(self(inputs), labels).backward()
        optimizer.step()


@pytest.fixture
def unruly(run: Path) -> Unruly:
    """An `Unruly` model, in training mode, after a recorded training."""
    torch.manual_seed(0)
    model = Unruly()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, run) as recorder:
        for step in range(8):
            inputs = torch.randn(6, 5)
            recorder.annotate(sample=torch.arange(6) + 6 * step, label=inputs[:, :3].argmax(1))
            model.train(inputs, inputs[:, :3].argmax(1), optimizer)
    return model


def modes(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


QUESTIONS: dict[str, Callable[[dualform.Memory, nn.Module, Tensor], Any]] = {
    "attend": lambda memory, model, inputs: memory.attend(model, inputs)["last"].attention(),
    "effects": lambda memory, model, inputs: memory.attend(model, inputs, quantity="margin").effects().values,
    "slopes": lambda memory, model, inputs: slopes(model, inputs[:1], ["first", "last"], unit=0)["first"],
    "predict": lambda memory, model, inputs: predict_units(model, inputs),
    "predict without the 0s": lambda memory, model, inputs: predict_units(memory.without(label=0).apply(model), inputs),
    "session": lambda memory, model, inputs: Session(memory, model, budget=1 << 20).model(inputs),
    "estimate": lambda memory, model, inputs: torch.tensor(dualform.estimate(model, inputs, steps=3).total),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_sees_no_dropout_and_leaves_every_mode(run: Path, unruly: Unruly, question: str) -> None:
    inputs = torch.randn(64, 5)
    before = modes(unruly)
    assert before["drop"]
    assert not before["frozen"]
    answers = [QUESTIONS[question](dualform.open(run), unruly, inputs) for _ in range(2)]
    torch.testing.assert_close(answers[0], answers[1], rtol=0, atol=0)
    assert modes(unruly) == before


def test_modes_come_back_when_the_model_fails() -> None:
    model = Unruly()
    before = modes(model)
    seen: list[dict[str, bool]] = []

    def fail() -> None:
        with evaluating(model):
            seen.append(modes(model))
            raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        fail()
    assert not any(seen[0].values())
    assert modes(model) == before


def test_a_copy_in_evaluation_mode_leaves_the_model_alone() -> None:
    model = Unruly()
    before = modes(model)
    copied = evaluation_copy(model)
    assert not any(modes(copied).values())
    assert modes(model) == before


def test_predictions_of_a_text_are_those_of_the_last_position() -> None:
    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 7)

        def forward(self, tokens: Tensor) -> tuple[Tensor, None]:
            return self.table(tokens), None

    model, tokens = Text(), torch.randint(0, 7, (4, 3))
    expected = model.table(tokens)[:, -1].argmax(dim=1)
    torch.testing.assert_close(predict_units(model, tokens), expected)
