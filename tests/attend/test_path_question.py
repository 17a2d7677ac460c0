"""Path contributions that are asked before a training: those that patterns of the same training give."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from dualform.attend.path import PathContributions
from dualform.effects.path_walk import PathWalk
from dualform.errors import CorruptError, QueryError, RefusedError, ResumeError, SharesOnlyError
from dualform.recording import gradient_samples, probes, step_recorder
from dualform.recording.media import PATHS
from dualform.recording.world import OneProcess
from dualform.store.memory_blobs import MemoryBlobs

Optimizers = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizers] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
}
STEPS = 12


class Normed(nn.Module):
    """A network with a norm, and with one layer that is called twice."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.norm = norm
        self.again = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.again(torch.tanh(self.norm(self.first(x)))))
        found: Tensor = self.last(torch.tanh(self.again(hidden)))
        return found


def network() -> nn.Module:
    torch.manual_seed(0)
    return Normed(nn.LayerNorm(6)).double()


def inputs(count: int = 4, seed: int = 99) -> Tensor:
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def train(place: Any, optimizer: str, keep: Any, *, model: nn.Module | None = None, **options: Any) -> nn.Module:
    model = network() if model is None else model
    chosen = OPTIMIZERS[optimizer](model.parameters())
    with dualform.record(model, chosen, place, keep=keep, **options) as recorder:
        for step in range(STEPS):
            rows = inputs(8, seed=step)
            labels = torch.arange(8) % (2 if step < 4 else 3)  # the third group comes late
            if step != 6:  # a step without labels is the group None
                recorder.annotate(label=labels)
            chosen.zero_grad()
            functional.cross_entropy(model(rows), labels).backward()
            chosen.step()
    return model


def asked_afterwards(optimizer: str, **options: Any) -> PathContributions:
    blobs = MemoryBlobs()
    model = train(blobs, optimizer, dualform.Patterns())
    spotlight = dualform.open(blobs).attend(model, inputs(), quantity=dualform.contrast(1, 0))
    return spotlight.path_contributions(by="label", **options)


def question(**options: Any) -> dualform.PathQuestion:
    return dualform.PathQuestion(inputs(), quantity=dualform.contrast(1, 0), **options)


def shares(paths: dict[str, Any], **options: Any) -> dualform.Shares:
    return dualform.Shares(by="label", paths=paths, **options)


@pytest.mark.parametrize(("optimizer", "against"), [("sgd", inputs(3, seed=7)), ("adamw", None)], ids=OPTIMIZERS)
def test_the_answer_is_that_of_patterns(tmp_path: Path, optimizer: str, against: Tensor | None) -> None:
    """Both follow every step, at the same points, so that only rounding is between them."""
    train(tmp_path / "run", optimizer, shares({"why": question(against=against)}))
    memory = dualform.open(tmp_path / "run")
    assert memory.verify().passed
    assert list(memory.paths) == ["why"]
    found, wanted = memory.paths["why"], asked_afterwards(optimizer, against=against)
    assert found.groups == wanted.groups == (0, 1, 2, None)
    assert (found.by, found.layers, found.quantity) == (wanted.by, wanted.layers, wanted.quantity)
    for field in ("output", "start", "values", "by_layer", "residual"):
        torch.testing.assert_close(getattr(found, field), getattr(wanted, field), rtol=0, atol=1e-11, msg=field)
    whole = found.start + found.values.sum(1) + found.state + found.rest + found.residual
    torch.testing.assert_close(whole, found.output)


@pytest.mark.parametrize("late", [False, True])
def test_what_no_layer_covers_is_seen_where_a_segment_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Statistics of a batch normalisation, which the next forward has changed already where a step is folded late."""
    if late:
        monkeypatch.setattr(step_recorder, "is_one_gpu", lambda devices: True)
        monkeypatch.setattr(gradient_samples, "is_at_hand", lambda tensor: False)
        monkeypatch.setattr(probes, "is_at_hand", lambda tensor: False)
    torch.manual_seed(0)
    model = Normed(nn.BatchNorm1d(6)).double()
    seen: list[tuple[int, Tensor]] = []
    real = PathWalk.go_to

    def go_to(self: PathWalk, done: int, weights: Any, state: Any, *rest: Any, **options: Any) -> None:
        seen.append((done, state["norm.running_mean"].clone()))
        real(self, done, weights, state, *rest, **options)

    monkeypatch.setattr(PathWalk, "go_to", go_to)
    after: list[Tensor] = []

    def note(module: nn.Module, given: Any, output: Any) -> None:
        if module is model:  # and not a copy of it
            after.append(module.get_buffer("norm.running_mean").clone())

    model.register_forward_hook(note)
    train(tmp_path / "run", "sgd", shares({"why": question()}), model=model, check_rows=False)
    for done, mean in seen:
        assert torch.equal(mean, after[done - 1]), done
    found = dualform.open(tmp_path / "run").paths["why"]
    assert float(found.state.abs().max()) > 1e-3
    model.eval()
    with torch.no_grad():
        output = model(inputs())
    torch.testing.assert_close(found.output, output[:, 1] - output[:, 0], rtol=0, atol=1e-12)
    whole = found.start + found.values.sum(1) + found.state + found.rest + found.residual
    torch.testing.assert_close(whole, found.output)


def test_segments_of_several_steps_say_their_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualform.attend.path_question.FEWEST_SEGMENTS", 2)
    train(tmp_path / "run", "sgd", shares({"fine": question(tolerance=1e-9), "coarse": question(tolerance=0.5)}))
    fine, coarse = (dualform.open(tmp_path / "run").paths[name] for name in ("fine", "coarse"))
    assert coarse.evaluations < STEPS < fine.evaluations
    apart = float((fine.values - coarse.values).abs().sum() / fine.values.abs().sum())
    assert 0 < apart < 5 * coarse.parts_error
    assert "Parts to about" in repr(coarse)


def test_the_training_is_equal_to_the_bit(tmp_path: Path) -> None:
    found = [train(tmp_path / str(len(paths)), "adamw", shares(paths)) for paths in ({}, {"why": question()})]
    expected = found[0].state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found[1].state_dict().items())
    assert all(parameter.grad is not None for parameter in found[1].parameters())


def test_questions_that_cannot_be_followed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(QueryError, match="needs targets: what the trained model will say is not known"):
        dualform.PathQuestion(inputs(), quantity="margin")
    with pytest.raises(QueryError, match="quantity is 'entropy'; expected one of"):
        dualform.PathQuestion(inputs(), quantity="entropy")  # type: ignore[arg-type]
    with pytest.raises(QueryError, match="tolerance is 2; expected"):
        question(tolerance=2)
    with pytest.raises(ValueError, match="expected a mapping"):
        dualform.Shares(by="label", paths=[question()])  # type: ignore[arg-type]
    with pytest.raises(QueryError, match="names a class that the model does not have"):
        train(
            tmp_path / "class",
            "sgd",
            shares({"why": dualform.PathQuestion(inputs(), quantity=dualform.contrast(9, 0))}),
        )
    model = train(tmp_path / "run", "sgd", shares({}))
    with pytest.raises(SharesOnlyError, match=r"Shares\(paths="):
        dualform.open(tmp_path / "run").attend(model, inputs(), quantity=dualform.contrast(1, 0)).path_contributions(
            by="label"
        )
    with pytest.raises(ResumeError, match="follows a training from its first step"):
        train(tmp_path / "run", "sgd", shares({"why": question()}), model=model, resume=True)


class Mixing(nn.Module):
    """A network whose inputs see each other."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.only(x - x.mean(0))
        return found


def test_a_model_that_mixes_rows_is_refused_before_the_training(tmp_path: Path) -> None:
    with pytest.raises(QueryError, match="see each other"):
        train(tmp_path / "run", "sgd", shares({"why": question()}), model=Mixing().double())


@pytest.mark.parametrize("broken", ["word", "shape", "name"])
def test_a_broken_answer_is_named(tmp_path: Path, broken: str) -> None:
    train(tmp_path / "run", "sgd", shares({"why": question()}))
    memory = dualform.open(tmp_path / "run")
    files = memory._run.require_files()
    tensors = dict(files.paths())
    if broken == "word":
        tensors["0.words"] = tensors["0.words"][:-1]
    elif broken == "shape":
        tensors["0.values"] = tensors["0.values"][:, :-1]
    else:
        del tensors["0.name"]
    files.attach({PATHS: tensors})
    with pytest.raises(CorruptError, match=r"path contributions that .* keeps cannot be read"):
        assert memory.paths


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OneProcess, "size", 2, raising=False)
    with pytest.raises(RefusedError, match=r"paths=.*not supported for a training in several processes"):
        train(MemoryBlobs(), "sgd", shares({"why": question()}))
