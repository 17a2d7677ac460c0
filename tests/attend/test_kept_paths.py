"""Path contributions that were found before are not computed again; another question is another answer."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dualform
from dualform.attend.kept_paths import name_path
from dualform.attend.path import Asked, PathContributions, find_path_contributions

OTHERWISE: dict[str, Any] = {"by": "source", "tolerance": 0.5, "over": dualform.bins("step", width=2)}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module, Tensor]:
    folder = tmp_path_factory.mktemp("paths") / "run"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.BatchNorm1d(6, affine=False), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(12, 4)
    with dualform.record(model, optimizer, folder) as recorder:
        for step in range(6):
            rows = torch.arange(6) + 6 * (step % 2)
            known = {} if step == 5 else {"source": ["a" if row % 2 else "b" for row in rows.tolist()]}
            recorder.annotate(label=rows % 3, **known)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[rows]), rows % 3).backward()
            optimizer.step()
    return folder, model, inputs


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The questions that were computed, and not found in the cache."""
    asked: list[Any] = []

    def counted(*arguments: Any, **options: Any) -> PathContributions:
        asked.append(arguments)
        return find_path_contributions(*arguments, **options)

    monkeypatch.setattr("dualform.attend.spotlight.find_path_contributions", counted)
    return asked


def test_the_next_process_finds_the_same_answer(recorded: tuple[Path, nn.Module, Tensor], computed: list[Any]) -> None:
    folder, model, inputs = recorded
    question: dict[str, Any] = {
        "by": ["label", "source"],
        "against": inputs[6:],
        "over": dualform.bins("step", width=3),
    }
    for quantity in ("logit", dualform.contrast(2, 0)):
        computed.clear()
        first = dualform.open(folder).attend(model, inputs[:2], quantity=quantity)
        assert first.kept_path_contributions(**question) is None
        found = first.path_contributions(**question)
        again = dualform.open(folder).attend(model, inputs[:2], quantity=quantity).path_contributions(**question)
        assert len(computed) == 1
        assert repr(again) == repr(found)
        assert again.groups == found.groups
        assert (0, None) in found.groups
        assert again.to_arrow().equals(found.to_arrow())
        assert again.by_step is not None
        torch.testing.assert_close(again.by_step, found.by_step, rtol=0, atol=0)


@pytest.mark.parametrize(
    "other", ["inputs", "quantity", "by", "against", "over", "tolerance", "per", "horizon", "buffers"]
)
def test_another_question_is_computed(
    recorded: tuple[Path, nn.Module, Tensor], computed: list[Any], other: str
) -> None:
    folder, model, inputs = recorded
    memory = dualform.open(folder)
    question: dict[str, Any] = {"by": "label", "against": inputs[6:8]}
    rows, quantity = inputs[:2], dualform.contrast(1, 0)
    memory.attend(model, rows, quantity=quantity, other_model=True).path_contributions(**question)
    computed.clear()
    changed = model
    if other == "inputs":
        rows = inputs[1:3]
    elif other == "quantity":
        quantity = dualform.contrast(1, 2)
    elif other == "horizon":
        memory = memory.at(step=3)
    elif other == "per":
        question = {"per": "layer", "against": inputs[6:8]}
    elif other == "buffers":
        changed = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.BatchNorm1d(6, affine=False), nn.Linear(6, 3))
    else:
        question[other] = OTHERWISE.get(other, inputs[7:9])
    memory.attend(changed, rows, quantity=quantity, other_model=True).path_contributions(**question)
    assert len(computed) == 1


def test_layers_are_not_taken_for_groups(recorded: tuple[Path, nn.Module, Tensor], computed: list[Any]) -> None:
    folder, model, inputs = recorded
    spotlight = dualform.open(folder).attend(model, inputs[:1], quantity=dualform.contrast(1, 0))
    found = spotlight.path_contributions(per="layer")
    assert found.by == ("layer",)
    assert spotlight.path_contributions(by="label").by == ("label",)
    assert spotlight.path_contributions(per="layer").by == ("layer",)
    assert len(computed) <= 2


def test_a_model_that_is_printed_alike_and_computes_otherwise_is_asked_anew(
    recorded: tuple[Path, nn.Module, Tensor], computed: list[Any]
) -> None:
    folder, model, inputs = recorded

    class Sequential(nn.Sequential):
        def forward(self, rows: Tensor) -> Tensor:
            hidden: Tensor = super().forward(rows)
            return hidden * 2

    for asked in (model, Sequential(*model.children())):
        spotlight = dualform.open(folder).attend(asked, inputs[:1], quantity=dualform.contrast(0, 2))
        spotlight.path_contributions(by="label")
    assert len(computed) == 2


def test_a_function_of_the_users_is_computed_each_time(
    recorded: tuple[Path, nn.Module, Tensor], computed: list[Any]
) -> None:
    folder, model, inputs = recorded
    spotlight = dualform.open(folder).attend(model, inputs[:1], quantity=lambda outputs, _: outputs[:, 0])
    for _ in range(2):
        spotlight.path_contributions(by="label")
    assert len(computed) == 2
    assert spotlight.kept_path_contributions(by="label") is None


class Scaled(nn.Module):
    """A linear layer whose outputs are multiplied by a number that nobody prints, and by another function's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.settings = nn.Linear(4, 3), 1.0, SimpleNamespace(power=1, own=object())

    def factor(self) -> float:
        return float(self.scale**self.settings.power)

    def forward(self, rows: Any) -> Tensor:
        found: Tensor = self.layer(torch.as_tensor(getattr(rows, "content", rows))) * self.factor()
        return found


class Wrapped:
    """Inputs whose content cannot be told from outside."""

    def __init__(self, content: Tensor) -> None:
        self.content = content

    def __repr__(self) -> str:
        return "Wrapped"


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Scaled, Tensor]:
    folder = tmp_path_factory.mktemp("scaled") / "run"
    torch.manual_seed(0)
    model, inputs = Scaled(), torch.randn(400, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, folder) as recorder:
        for _ in range(3):
            recorder.annotate(label=torch.arange(400) % 3)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), torch.arange(400) % 3).backward()
            optimizer.step()
    return folder, model, inputs


@pytest.mark.parametrize("what", ["attribute", "object", "method", "arrays"])
def test_what_is_not_printed_of_a_model_and_its_inputs_counts(
    scaled: tuple[Path, Scaled, Tensor], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model, inputs = scaled
    rows: Any = inputs
    memory = dualform.open(folder)
    if what == "arrays":
        rows = {"rows": inputs.numpy()}
    memory.attend(model, rows, quantity=dualform.contrast(1, 0)).path_contributions("label")
    if what == "attribute":
        monkeypatch.setattr(model, "scale", 3.0)
    elif what == "object":
        monkeypatch.setattr(model, "scale", 2.0)
        memory.attend(model, rows, quantity=dualform.contrast(1, 0)).path_contributions("label")
        monkeypatch.setattr(model.settings, "power", 2)
    elif what == "method":
        monkeypatch.setattr(Scaled, "factor", lambda self: 5.0)
    else:
        other = inputs.numpy().copy()
        other[200] = 7.0  # which numpy does not print
        rows = {"rows": other}
    found = memory.attend(model, rows, quantity=dualform.contrast(1, 0)).path_contributions("label")
    outputs = (model(**rows) if isinstance(rows, dict) else model(rows)).detach().double()
    torch.testing.assert_close(found.output, outputs[:, 1] - outputs[:, 0], rtol=1e-5, atol=1e-5)


def test_a_quantity_of_the_users_and_inputs_that_cannot_be_read_are_not_kept(
    scaled: tuple[Path, Scaled, Tensor],
) -> None:
    folder, model, inputs = scaled
    memory = dualform.open(folder)
    for weights in (torch.tensor([1.0, 0, 0]), torch.tensor([0, 5.0, 0])):
        found = memory.attend(model, inputs[:2], quantity=Weighted(weights)).path_contributions("label")
        torch.testing.assert_close(found.output, (model(inputs[:2]) @ weights).detach().double(), rtol=1e-5, atol=1e-5)
    asked = [Asked(model, [Wrapped(inputs[:2])], None, dualform.contrast(1, 0)), Asked(model, [inputs], None, "logit")]
    assert [name_path(one, 3, {}) is None for one in asked] == [True, False]


@dataclass
class Weighted:
    """A quantity of the user's."""

    weights: Tensor = field(repr=False)

    def __call__(self, outputs: Tensor, targets: Any) -> Tensor:
        return outputs @ self.weights
