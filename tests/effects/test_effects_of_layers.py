"""Effects of every layer of the linear family, by an identity that needs none of our code.

Without its filter an effect is what a pattern's update adds to the quantity to first order. So with plain SGD the
effects of all patterns of a layer sum to ⟨gradient of the quantity, change of the parameters⟩, which autograd knows.
"""

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from dualform.effects.output_gradients import measure_quantity
from helpers.loops import gradient_of

CLASSES = 4


class Recurrent(nn.Module):
    """An LSTM or a plain recurrent layer, and logits from its last state; rows are the first axis."""

    def __init__(self, kind: Callable[..., nn.RNNBase]) -> None:
        super().__init__()
        self.core = kind(3, 5, batch_first=True)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, (B, classes)."""
        return self.head(self.core(x)[0][:, -1])


class Attentive(nn.Module):
    """Self-attention over positions, and logits from their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.core = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, (B, classes)."""
        return self.head(self.core(x, x, x, need_weights=False)[0].mean(dim=1))


class Twice(nn.Module):
    """One linear layer that is called twice, with an in-place activation on its output."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(6, 6)
        self.head = nn.Linear(6, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, (B, classes)."""
        x = self.again(x).relu_()
        return self.head(functional.relu(self.again(x), inplace=True).mean(dim=1))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, CLASSES)), (6,)),
    "flattened": (
        lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Flatten(1), nn.Linear(10, CLASSES)),
        (2, 3),
    ),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3, stride=2), nn.ReLU(), nn.Flatten(1), nn.Linear(12, CLASSES)),
        (2, 5, 5),
    ),
    "lstm": (lambda: Recurrent(nn.LSTM), (4, 3)),
    "rnn": (lambda: Recurrent(nn.RNN), (4, 3)),
    "attention": (Attentive, (3, 4)),
    "twice": (Twice, (2, 6)),
}


def trained(path: Path, name: str) -> tuple[dualform.Memory, nn.Module, nn.Module, tuple[int, ...]]:
    """Record four steps of plain SGD; return the memory, the model, and the model at the start."""
    make, shape = NETWORKS[name]
    torch.manual_seed(3)
    model = make().double()
    start = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    with dualform.record(model, optimizer, path) as recorder:
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            inputs = torch.randn(8, *shape, generator=generator, dtype=torch.float64)
            labels = torch.randint(CLASSES, (8,), generator=generator)
            recorder.annotate(sample=torch.arange(8), label=labels)
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    return dualform.open(path), model, start, shape


@pytest.mark.parametrize("name", NETWORKS)
def test_without_a_filter_effects_sum_to_the_gradient_times_the_change(run: Path, name: str) -> None:
    memory, model, start, shape = trained(run, name)
    generator = torch.Generator().manual_seed(99)
    inputs = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, (3,), generator=generator)
    spot = memory.attend(model, inputs, targets=labels)
    assert spot.outside() == {}
    assert list(spot) == list(memory.layers)
    before = dict(start.named_parameters())
    for layer in spot:
        source = dataclasses.replace(spot[layer]._require_asked(), filtering="none")
        found = source.totals(spot[layer]._group("label")).sum(dim=1)
        mine = memory.layers[layer].parameters.values()
        for i in range(3):
            model.zero_grad()
            measure_quantity(model.eval()(inputs[i : i + 1]), labels[i : i + 1], "margin").sum().backward()
            parameters = dict(model.named_parameters())
            moved = {p: parameters[p].detach() - before[p].detach() for p in mine}
            expected = sum(float((change * gradient_of(parameters[p])).sum()) for p, change in moved.items())
            assert float(found[i]) == pytest.approx(expected, rel=1e-8, abs=1e-12), layer


@pytest.mark.parametrize("name", NETWORKS)
def test_the_pass_over_patterns_agrees_with_the_shares(run: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, model, _, shape = trained(run, name)
    inputs = torch.randn(3, *shape, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    spot = memory.attend(model, inputs, quantity="loss")
    exact = {layer: spot[layer].effects().values for layer in spot}
    monkeypatch.setattr("dualform.effects.layer_effects.MAX_EFFECT_SHARES_BYTES", 0)
    for layer, expected in exact.items():
        assert float((spot[layer].effects().values - expected).norm()) < 1e-3 * float(expected.norm()), layer


def test_a_gru_is_listed_as_outside(run: Path) -> None:
    NETWORKS["gru"] = (lambda: Recurrent(nn.GRU), (4, 3))
    try:
        memory, model, _, shape = trained(run, "gru")
    finally:
        del NETWORKS["gru"]
    spot = memory.attend(model, torch.randn(2, *shape, dtype=torch.float64), quantity="margin")
    assert spot.effects().layers == ("head",)
    assert all("not of the linear family" in reason for reason in spot.outside().values())
    assert len(spot.outside()) == len(memory.layers) - 1


def test_rows_first_or_positions_first(run: Path) -> None:
    """With batch_axis=1 inputs, outputs and targets have their rows on the second axis."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(4, 6, 3, dtype=torch.float64)  # (L, B, d)
    targets = torch.randint(CLASSES, (4, 6))
    with dualform.record(model, optimizer, run, batch_axis=1) as recorder:
        recorder.annotate(sample=torch.arange(6))
        functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
    memory = dualform.open(run)
    both: Any = memory.attend(model, inputs[:, :2], targets=targets[:, :2]).effects().values
    alone = [memory.attend(model, inputs[:, i : i + 1], targets=targets[:, i : i + 1]).effects().values for i in (0, 1)]
    torch.testing.assert_close(both, torch.cat(alone), rtol=1e-9, atol=1e-12)
