"""Path contributions of single samples: backwards through the steps, they are those of groups forwards."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from dualform.attend import path
from dualform.attend.path import PathContributions
from dualform.effects import path_samples
from dualform.engine.jobs import Job
from dualform.engine.part_states import run_onlookers_here
from dualform.engine.plain import PlainExecutor
from dualform.engine.source import PatternSource
from dualform.errors import QueryError, SelectionError, SharesOnlyError
from dualform.replaying.replayed_patterns import ReplayedPatterns

STEPS = 12
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "plain": lambda p: torch.optim.SGD(p, lr=0.2),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "decay": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "late decay": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.02, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


class Attending(nn.Module):
    """Embedding, attention and a normalisation, with the embedding tied to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 8)
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 7, bias=False)
        self.out.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.tokens((x * 2).long().clamp(-3, 3) + 3))
        return self.out(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Convolving(nn.Module):
    """A convolution with a batch normalisation, whose statistics no layer covers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 3, 2)
        self.norm = nn.BatchNorm1d(3)
        self.out = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.norm(self.conv(x[:, None]))).flatten(1))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(24, 5, generator=generator, dtype=torch.float64), torch.arange(24) % 3


def train(run: Path, optimizer: str, make: Callable[[], nn.Module] = perceptron) -> nn.Module:
    x, y = data()
    torch.manual_seed(0)
    model = make().double()
    trained = OPTIMIZERS[optimizer](model.parameters())
    with dualform.record(model, trained, run) as recorder:
        for step in range(STEPS):
            rows = torch.arange(8) * 3 % 24 + step % 3 if step % 2 else torch.arange(8) + 8 * (step % 3)
            recorder.annotate(sample=rows, label=y[rows])
            trained.zero_grad()
            functional.cross_entropy(model(x[rows]), y[rows]).backward()
            if optimizer == "late decay" and step == STEPS // 2:
                trained.param_groups[0]["weight_decay"] = 0.1
            trained.step()
    return model


def ask(run: Path, model: nn.Module, **options: object) -> PathContributions:
    x, _ = data()
    spotlight = dualform.open(run, trust=True).attend(model, x[:4] * 0.9, quantity=lambda outputs, _: outputs[:, 1])
    return spotlight.path_contributions(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_samples_backwards_are_groups_forwards(tmp_path: Path, optimizer: str) -> None:
    model = train(tmp_path / "run", optimizer)
    forward = ask(tmp_path / "run", model, by="sample", tolerance=1e-9)
    backward = ask(tmp_path / "run", model, per="sample", tolerance=1e-9)
    assert backward.groups == forward.groups
    torch.testing.assert_close(backward.values, forward.values, rtol=0, atol=6e-14)
    torch.testing.assert_close(backward.by_layer, forward.by_layer, rtol=0, atol=6e-14)
    torch.testing.assert_close(backward.start, forward.start, rtol=0, atol=6e-14)
    assert float(backward.residual.abs().max()) < 1e-8


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("make", [Attending, Convolving])
def test_samples_of_every_kind_of_parameter(tmp_path: Path, optimizer: str, make: Callable[[], nn.Module]) -> None:
    model = train(tmp_path / "run", optimizer, make)
    forward = ask(tmp_path / "run", model, by="sample", tolerance=1e-9)
    backward = ask(tmp_path / "run", model, per="sample", tolerance=1e-9)
    torch.testing.assert_close(backward.values, forward.values, rtol=1e-12, atol=1e-12)
    assert bool(backward.state.abs().sum() > 0) == (make is Convolving)


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_little_memory_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str) -> None:
    """Inputs one by one, and no weights kept along the path, so that steps are replayed."""
    model = train(tmp_path / "run", optimizer)
    x, _ = data()
    whole = ask(tmp_path / "run", model, per="sample", against=x[6:12])
    monkeypatch.setattr(path_samples, "BLOCK_BYTES", 1)
    monkeypatch.setattr(path, "KNOT_BYTES", 1)
    one_by_one = ask(tmp_path / "run", model, per="sample", against=x[6:12])
    torch.testing.assert_close(one_by_one.values, whole.values, rtol=0, atol=1e-13)


def test_the_parts_of_layers_and_the_largest_samples(tmp_path: Path) -> None:
    model = train(tmp_path / "run", "momentum")
    by_label = ask(tmp_path / "run", model, by="label", tolerance=1e-6)
    layers = ask(tmp_path / "run", model, per="layer", tolerance=1e-6)
    assert layers.groups == ("0", "2")
    torch.testing.assert_close(layers.values, by_label.by_layer.sum(1), rtol=0, atol=1e-7)
    samples = ask(tmp_path / "run", model, per="sample")
    best = samples.top(3, query=2)
    sizes = samples.values[2].abs()
    assert [sample for sample, _ in best] == [samples.groups[i] for i in sizes.argsort(descending=True)[:3].tolist()]
    assert best[0][1] == float(samples.values[2][samples.groups.index(best[0][0])])
    with pytest.raises(QueryError, match="query is 9"):
        samples.top(query=9)


class Flipping(nn.Module):
    """A network whose second layer sees the rows of the batch in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)).flip(0)).flip(0)


class Mixing(Flipping):
    """A network whose inputs see each other."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.second(hidden - hidden.mean(0))


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize(
    ("make", "message"), [(Flipping, "layer 'second' sees are not those"), (Mixing, "inputs of a batch see each other")]
)
def test_models_that_move_or_mix_rows_are_refused(tmp_path: Path, make: Callable[[], nn.Module], message: str) -> None:
    model = train(tmp_path / "run", "plain", make)
    with pytest.raises(QueryError, match=message):
        ask(tmp_path / "run", model, by="label")


def test_what_samples_cannot_be_asked_is_refused(tmp_path: Path) -> None:
    model = train(tmp_path / "run", "plain")
    with pytest.raises(QueryError, match="got neither of by and per"):
        ask(tmp_path / "run", model)
    with pytest.raises(QueryError, match="got both of by and per"):
        ask(tmp_path / "run", model, by="label", per="sample")
    with pytest.raises(QueryError, match="per is 'pattern'"):
        ask(tmp_path / "run", model, per="pattern")
    with pytest.raises(QueryError, match="over needs groups"):
        ask(tmp_path / "run", model, per="sample", over=dualform.bins("step", width=2))
    x, y = data()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False)).double()
    muon = torch.optim.Muon(model.parameters(), lr=0.02)
    with dualform.record(model, muon, tmp_path / "muon") as recorder:
        for _ in range(2):
            recorder.annotate(sample=torch.arange(24), label=y)
            muon.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            muon.step()
    with pytest.raises(QueryError, match="was trained by Muon, whose steps mix rows"):
        ask(tmp_path / "muon", model, per="sample")
    found = ask(tmp_path / "muon", model, by="label")
    assert found.residual_error < 0.01


def test_samples_need_a_column_that_numbers_them(tmp_path: Path) -> None:
    x, y = data()
    model = perceptron().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        recorder.annotate(label=y)
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    with pytest.raises(SelectionError, match='needs a column "sample"'):
        ask(tmp_path / "run", model, per="sample")


class Cutting:
    """An executor that has other processes run jobs, which cannot take folds that look at all parameters together."""

    def run(self, source: PatternSource, jobs: Sequence[Job]) -> list[Any]:
        return run_onlookers_here(self._send, source, jobs)

    def _send(self, source: PatternSource, jobs: Sequence[Job]) -> list[Any]:
        assert all(getattr(job, "onlooker", None) is None for job in jobs)
        return PlainExecutor().run(source, jobs)


def test_other_processes_are_not_given_what_looks_at_all_parameters(tmp_path: Path) -> None:
    model = train(tmp_path / "run", "momentum")
    x, _ = data()
    found = []
    for executor in ("local", Cutting()):
        memory = dualform.open(tmp_path / "run", executor=executor)
        spotlight = memory.attend(model, x[:4] * 0.9, quantity=lambda outputs, _: outputs[:, 1])
        found.append(spotlight.path_contributions(by="label").values)
    torch.testing.assert_close(*found)


def training(recording: Any) -> nn.Module:
    """The training of `train` with SGD, as a function that can be run again."""
    x, y = data()
    torch.manual_seed(0)
    model = perceptron().double()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    with recording(model, optimizer) as recorder:
        for step in range(STEPS):
            rows = torch.arange(8) * 3 % 24 + step % 3 if step % 2 else torch.arange(8) + 8 * (step % 3)
            recorder.annotate(sample=rows, label=y[rows])
            optimizer.zero_grad()
            functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return model


def test_a_memory_of_steps_replays_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = train(tmp_path / "run", "momentum")
    dualform.record_training(training, tmp_path / "steps", keep=dualform.Steps())
    for options in ({"by": "label"}, {"per": "sample"}):
        wanted, found = (ask(tmp_path / name, model, **options) for name in ("run", "steps"))
        torch.testing.assert_close(found.values, wanted.values, rtol=0, atol=1e-13)
    monkeypatch.setattr(ReplayedPatterns, "can_hold", lambda self, layers: False)
    found = ask(tmp_path / "steps", model, by="label")
    torch.testing.assert_close(found.values, ask(tmp_path / "run", model, by="label").values, rtol=0, atol=1e-13)
    with pytest.raises(QueryError, match="go backwards through the steps"):
        ask(tmp_path / "steps", model, per="sample")


def test_a_memory_of_shares_is_refused(tmp_path: Path) -> None:
    x, y = data()
    model = perceptron().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", keep=dualform.Shares(by="label")) as recorder:
        recorder.annotate(label=y)
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    with pytest.raises(SharesOnlyError, match="a path contribution needs patterns"):
        ask(tmp_path / "run", model, by="label")
