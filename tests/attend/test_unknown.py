"""A mask says how many patterns it cannot decide, and a question says when its model is not the recorded one."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from dualform.attend.memory import Memory
from dualform.attend.removal import Removal
from dualform.attend.warn import MaskWarning, OtherModelWarning
from helpers.small import ROWS, batch, network, recorded, sgd, state, train

STEPS = 7  # of which steps 2 and 5 have no annotations


@pytest.fixture
def model(run: Path) -> nn.Sequential:
    return recorded(run, STEPS)


def reference(memory: Memory, layer: str, undecided: Callable[[dict[str, Any]], bool]) -> int:
    """Count patterns of the whole table by a plain function of their columns."""
    return sum(undecided(row) for row in memory.patterns(layer).to_pylist())


VIEWS: dict[str, tuple[Callable[[Memory], Memory], Callable[[dict[str, Any]], bool]]] = {
    "without": (lambda m: m.without(label=1), lambda row: row["label"] is None),
    "where": (lambda m: m.where(label=[0, 1]), lambda row: row["label"] is None),
    "sql": (lambda m: m.without("label = 1"), lambda row: row["label"] is None),
    "sql decided by the step": (
        lambda m: m.without("label = 1 and step >= 4"),
        lambda row: row["label"] is None and row["step"] >= 4,
    ),
    "sql that names the missing": (lambda m: m.without("label = 1 or label is null"), lambda row: False),
    "missing asked for": (lambda m: m.where(label=None), lambda row: False),
    "missing in a list": (lambda m: m.where(label=[None, 1]), lambda row: False),
    "steps": (lambda m: m.without("step < 3"), lambda row: False),
    "two columns": (
        lambda m: m.where(label=1, task="früh"),
        lambda row: row["label"] is None,
    ),
    "a column that comes and goes": (lambda m: m.without("mood > 0"), lambda row: row["mood"] is None),
    "another condition leaves them out": (
        lambda m: m.without(label=1).where("step < 4"),
        lambda row: row["label"] is None and row["step"] < 4,
    ),
    "horizon": (lambda m: m.without(label=1).at(step=4), lambda row: row["label"] is None and row["step"] < 4),
    "equal and sql": (
        lambda m: m.without("row > 2", label=1),
        lambda row: row["label"] is None and row["row"] > 2,
    ),
}


@pytest.mark.parametrize("view", VIEWS)
def test_undecided_patterns_are_counted(run: Path, model: nn.Module, view: str) -> None:
    look, undecided = VIEWS[view]
    memory = dualform.open(run)
    expected = {layer: count for layer in memory.layers if (count := reference(memory, layer, undecided))}
    assert look(memory).unknown() == expected
    text = repr(look(memory))
    assert (f"{sum(expected.values())} patterns have no value" in text) is bool(expected)


QUESTIONS: dict[str, Callable[[Memory, nn.Module], Any]] = {
    "weights": lambda view, model: view.weights(),
    "shares": lambda view, model: view.shares(),
    "apply": lambda view, model: view.apply(model),
    "attend": lambda view, model: view.attend(model, batch(99)[0]),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_mask_warns_once(run: Path, model: nn.Module, question: str) -> None:
    memory = dualform.open(run)
    ask = QUESTIONS[question]
    with pytest.warns(MaskWarning, match=rf"{4 * ROWS} patterns have no value .*{2 * ROWS} in layer '0'") as caught:
        ask(memory.without(label=1), model)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    ask(memory.without(label=1), model)  # a second warning would be an error here
    with pytest.warns(MaskWarning, match="label = 2"):
        ask(memory.without(label=2), model)


def test_a_mask_that_decides_every_pattern_does_not_warn(run: Path, model: nn.Module) -> None:
    memory = dualform.open(run)
    for view in (memory.without("step < 3"), memory.without("label = 1 or label is null"), memory.where(label=None)):
        view.weights()
        view.attend(model, batch(99)[0])


def test_counting_reads_no_addresses_where_nothing_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for step in range(3):
            recorder.annotate(label=batch(step)[1])
            optimizer.zero_grad()
            functional.cross_entropy(model(batch(step)[0]), batch(step)[1]).backward()
            optimizer.step()
    view = dualform.open(tmp_path / "run").without(label=1)
    monkeypatch.setattr("dualform.store.reader.Shard.addresses", None)
    assert view.unknown() == {}


def test_group_weights_count_what_a_removal_cannot_decide(run: Path, model: nn.Module) -> None:
    weights = dualform.open(run).group_weights("label")
    both = {"0": 2 * ROWS, "2": 2 * ROWS}
    assert weights.unknown(Removal(by=("label",), groups=(1,))) == both
    assert weights.unknown(Removal(by=("label",), groups=(None,))) == {}
    assert weights.unknown(Removal(steps=((0, 3),))) == {}
    assert weights.unknown(Removal(samples=(3,))) == both


# The model --------------------------------------------------------------------------------------------------------


def quiet(memory: Memory, model: nn.Module, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memory.attend(model, batch(99)[0].to(next(model.parameters()).dtype), **options)


def test_the_recorded_model_is_recognised_at_every_step(run: Path) -> None:
    model = network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run, shard_bytes=1000) as recorder:
        states = [state(model), *train(model, optimizer, range(STEPS), recorder)]
    memory = dualform.open(run)
    for step, then in enumerate(states):
        model.load_state_dict(then)
        quiet(memory.at(step=step), model)
        other = memory.at(step=(step + 3) % (STEPS + 1))
        with pytest.warns(OtherModelWarning, match=rf"not the recorded one .* those after step {step}") as caught:
            other.attend(model, batch(99)[0])
        assert caught[0].filename == __file__
        quiet(other, model, other_model=True)


def test_another_model_is_named_once(run: Path, model: nn.Module) -> None:
    memory = dualform.open(run)
    quiet(memory, model)
    with torch.no_grad():
        model.get_parameter("2.weight").mul_(1.01)
    with pytest.warns(OtherModelWarning, match=r"'2.weight' differ\. Ask with the model of that step"):
        memory.attend(model, batch(99)[0])
    quiet(memory, model)
    quiet(dualform.open(run), model, other_model=True)


def test_a_masked_network_is_another_model(run: Path, model: nn.Module) -> None:
    memory = dualform.open(run)
    masked = memory.without("step < 2").apply(model)
    with pytest.warns(OtherModelWarning, match="other_model=True"):
        memory.attend(masked, batch(99)[0])


def test_a_model_in_double_precision_is_the_same_model(run: Path, model: nn.Module) -> None:
    quiet(dualform.open(run), model.double())


def test_a_run_that_still_grows_is_recognised(run: Path) -> None:
    model = network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        train(model, optimizer, range(3), recorder)
        recorder.flush()
        memory = dualform.open(run)
        quiet(memory, model)
        train(model, optimizer, range(3, 4), recorder)
        with pytest.warns(OtherModelWarning, match="after step 3"):
            memory.attend(model, batch(99)[0])


class Normed(nn.Module):
    """A network with batch normalisation and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.scale = nn.Parameter(torch.ones(5))
        self.head = nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.head(self.norm(inputs) * self.scale)
        return found


@pytest.mark.filterwarnings("ignore:.*are not recorded:UserWarning")
def test_other_statistics_and_other_uncovered_weights_are_named(run: Path) -> None:
    model = Normed()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        train(model, optimizer, range(3), recorder)
    quiet(dualform.open(run), model)
    quiet(dualform.open(run), dualform.open(run).trained(Normed()))
    for name in ("norm.running_mean", "scale"):
        other = dualform.open(run).trained(Normed())
        with torch.no_grad():
            dict([*other.named_parameters(), *other.named_buffers()])[name].add_(0.1)
        with pytest.warns(OtherModelWarning, match=f"'{name}' differ"):
            dualform.open(run).attend(other, batch(99)[0])
