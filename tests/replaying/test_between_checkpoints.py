"""A memory is made of checkpoints and the data between them, and says how much of the change it explains."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

import dualform
from dualform.attend.memory import Memory
from dualform.attend.warn import MaskWarning
from dualform.errors import QueryError, ReplayError, ResumeError, SelectionError
from dualform.store.memory_blobs import MemoryBlobs
from helpers.trainings import MODELS, OPTIMIZERS, batch

STEPS = 12
State = dict[str, Tensor]


class Normed(nn.Sequential):
    """A convolution, a BatchNorm with its buffers, and a linear layer on images of 4 × 4 pixels."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))


def make(kind: str) -> nn.Module:
    torch.manual_seed(1)
    return Normed() if kind == "normed" else MODELS[kind]()


def data(kind: str, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs and labels of a step, and the numbers of its samples."""
    inputs, labels = batch("cnn" if kind == "normed" else kind, step)
    return inputs, labels, torch.arange(len(labels)) + step * len(labels)


def loss(model: nn.Module, one: tuple[Tensor, ...]) -> Tensor:
    return functional.cross_entropy(model(one[0]).flatten(0, -2), one[1].flatten())


def columns(one: tuple[Tensor, ...]) -> dict[str, Any]:
    return {"label": one[1], "sample": one[2]}


def train(kind: str, optimizer: str, recorder: Callable[[nn.Module, Any], Any] | None = None) -> list[State]:
    """Train as nobody records it, and return the state before the first step and after each."""
    model = make(kind)
    optimizers = OPTIMIZERS[optimizer](model)
    states = [copy.deepcopy(model.state_dict())]
    recording = None if recorder is None else recorder(model, optimizers).start()
    for step in range(STEPS):
        one = data(kind, step)
        if recording is not None:
            recording.annotate(**columns(one))
        for each in optimizers:
            each.zero_grad()
        loss(model, one).backward()
        for each in optimizers:
            each.step()
        states.append(copy.deepcopy(model.state_dict()))
    if recording is not None:
        recording.close()
    return states


def ask(
    kind: str, optimizer: str, states: Sequence[State], order: Sequence[Sequence[int]], **options: Any
) -> tuple[Memory, MemoryBlobs]:
    """Make a memory of states and of the steps whose batches come between them."""
    blobs = MemoryBlobs()
    memory = dualform.from_checkpoints(
        lambda: make(kind),
        states,
        lambda interval: (data(kind, step) for step in order[interval]),
        loss,
        OPTIMIZERS[optimizer],
        blobs,
        columns=columns if kind in ("mlp", "cnn", "normed") else None,
        **options,
    )
    return memory, blobs


def rests_by_hand(
    states: Sequence[State], order: Sequence[Sequence[int]], optimizer: str
) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Return ‖rest‖ and ‖change‖ of each parameter in each interval: gradients of one network, steps of another."""
    network, stepping = make("mlp"), make("mlp")
    optimizers, others = OPTIMIZERS[optimizer](network), OPTIMIZERS[optimizer](stepping)
    found = []
    for before, after, steps in zip(states[:-1], states[1:], order, strict=True):
        network.load_state_dict(before)
        first = {name: parameter.detach().clone() for name, parameter in stepping.named_parameters()}
        for step in steps:
            for each in optimizers:
                each.zero_grad()
            loss(network, data("mlp", step)).backward()
            for mine, other in zip(network.parameters(), stepping.parameters(), strict=True):
                assert mine.grad is not None
                other.grad = mine.grad.clone()
            for each in (*optimizers, *others):
                each.step()
        change = {name: after[name] - before[name] for name in first}
        made = {name: parameter.detach() - first[name] for name, parameter in stepping.named_parameters()}
        rest = {name: float((change[name] - made[name]).norm()) for name in first}
        found.append((rest, {name: float(one.norm()) for name, one in change.items()}))
    return found


def in_order(every: int) -> list[list[int]]:
    return [list(range(first, first + every)) for first in range(0, STEPS, every)]


@pytest.mark.parametrize("every", [1, 6])
@pytest.mark.parametrize(
    ("kind", "optimizer"), [("mlp", "SGD"), ("normed", "SGD"), ("cnn", "AdamW"), ("lstm", "AdamW"), ("mlp", "Muon")]
)
def test_the_very_batches_explain_everything(kind: str, optimizer: str, every: int) -> None:
    states = train(kind, optimizer)
    memory, _ = ask(kind, optimizer, states[::every], in_order(every))
    assert memory.explanation is not None
    assert memory.explanation.explained > 1 - 1e-9
    assert memory.verify(states[-1]).passed
    found = memory.trained(make(kind)).state_dict()
    assert all(torch.equal(found[name], states[-1][name]) for name in found)  # buffers too


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_a_checkpoint_after_every_step_gives_the_recorded_memory(optimizer: str) -> None:
    recorded = MemoryBlobs()
    states = train("cnn", optimizer, lambda model, optimizers: dualform.record(model, optimizers, recorded))
    memory, other = ask("cnn", optimizer, states, in_order(1))[0], dualform.open(recorded)
    queries = {"conv": torch.rand(2, 9), "head": torch.rand(2, 8)}
    ours, theirs = memory.attend(queries=queries), other.attend(queries=queries)
    for layer in queries:
        torch.testing.assert_close(ours[layer].attention(), theirs[layer].attention(), rtol=1e-6, atol=1e-6)
        assert ours[layer].top(3).to_arrow()["sample"].equals(theirs[layer].top(3).to_arrow()["sample"])
        torch.testing.assert_close(
            ours[layer].totals(by="label", of="contribution").values,
            theirs[layer].totals(by="label", of="contribution").values,
            rtol=1e-5,
            atol=1e-7,
        )


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Muon"])
def test_the_rest_is_measured_and_every_sum_is_complete(optimizer: str, capsys: pytest.CaptureFixture[str]) -> None:
    states = train("mlp", optimizer)
    order = [steps[::-1] for steps in in_order(4)]
    memory, blobs = ask("mlp", optimizer, states[::4], order)
    explanation = memory.explanation
    assert explanation is not None
    assert 0.2 < explanation.explained < 0.999
    printed = capsys.readouterr().out
    assert printed.startswith(f"explains {100 * explanation.explained:.0f}"[:10])
    assert "0-4" in printed
    by_hand = rests_by_hand(states[::4], order, optimizer)
    for found, (rest, change) in zip(explanation.intervals, by_hand, strict=True):
        assert found.rest == pytest.approx(rest, rel=1e-4, abs=1e-6)
        assert found.change == pytest.approx(change, rel=1e-5)
    again = dualform.open(blobs)
    outcome = again.verify(states[-1])
    assert not outcome.passed
    assert outcome.explained == pytest.approx(explanation.explained, abs=1e-5)
    assert "explains" in outcome.verdict
    assert again.info().explained == explanation.explained
    for step in (0, 4, 8, 12):  # the weights at each checkpoint are known
        for name, weight in again.at(step=step).weights().items():
            torch.testing.assert_close(weight, states[step][name], rtol=1e-5, atol=1e-6)
    for name, parts in again.shares(by="interval").items():
        assert parts.labels == (0, 1, 2)
        whole = parts.start + parts.shares.sum(0) + parts.unexplained + parts.rounding
        torch.testing.assert_close(whole.float(), states[-1][name], rtol=1e-5, atol=1e-6)
    model = make("mlp")
    model.load_state_dict(states[-1])
    spotlight = again.attend(model, torch.rand(2, 1, 4, 4))
    for layer in ("1", "3"):
        live = dict(model.named_modules())[layer](spotlight[layer].queries)
        torch.testing.assert_close(spotlight[layer].output().float(), live, rtol=1e-4, atol=1e-5)


def test_a_mask_says_how_much_its_patterns_explain() -> None:
    states = train("mlp", "SGD")
    memory, _ = ask("mlp", "SGD", states[::4], [steps[::-1] for steps in in_order(4)])
    with pytest.warns(MaskWarning, match=r"patterns explain \d\d.* of the change"):
        memory.without(label=1).weights()
    with pytest.raises(SelectionError, match="Ask after step 0, 4, 8, 12, and not after 5"):
        memory.at(step=5).weights()
    model = make("mlp")
    model.load_state_dict(states[-1])
    spotlight = memory.attend(model, torch.rand(2, 1, 4, 4), targets=torch.tensor([0, 1]), quantity="logit")
    with pytest.raises(QueryError, match="a path contribution needs them"):
        spotlight.path_contributions(by="label")


def test_other_data_explain_nothing() -> None:
    states = train("mlp", "SGD")
    blobs = MemoryBlobs()
    memory = dualform.from_checkpoints(
        lambda: make("mlp"),
        states[::4],
        [[(data("mlp", step)[0], 2 - data("mlp", step)[1]) for step in steps] for steps in in_order(4)],
        loss,
        OPTIMIZERS["SGD"],
        blobs,
    )
    assert memory.explanation is not None
    assert memory.explanation.explained < 0.05
    assert "as large as the change" in str(memory.explanation)
    with pytest.raises(QueryError, match="explain nothing of the change"):
        memory.where("step < 4").weights()


def test_rates_and_files(tmp_path: Path) -> None:
    model = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    torch.save(model.state_dict(), tmp_path / "0.pt")
    for step in range(2):
        optimizer.param_groups[0]["lr"] = (0.1, 0.02)[step]
        optimizer.zero_grad()
        loss(model, data("mlp", step)).backward()
        optimizer.step()
        torch.save(model.state_dict(), tmp_path / f"{step + 1}.pt")
    save_file(model.state_dict(), tmp_path / "last.safetensors")
    torch.save({"model": model.state_dict(), "step": 2}, tmp_path / "nested.pt")

    def explained(checkpoints: Sequence[Any], rates: Any, order: Sequence[Sequence[int]] = ((0,), (1,))) -> float:
        found = dualform.from_checkpoints(
            lambda: make("mlp"),
            checkpoints,
            [[data("mlp", step) for step in steps] for steps in order],
            loss,
            lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
            MemoryBlobs(),
            rates=rates,
        ).explanation
        assert found is not None
        return found.explained

    files = [tmp_path / "0.pt", str(tmp_path / "1.pt"), tmp_path / "last.safetensors"]
    assert explained(files, [0.1, 0.02]) > 1 - 1e-9
    assert explained(files, lambda step: (0.1, 0.02)[step]) > 1 - 1e-9
    assert explained(files[::2], lambda step: (0.1, 0.02)[step], [(0, 1)]) > 1 - 1e-9
    assert explained(files, None) == 0.0
    nested = lambda: torch.load(tmp_path / "nested.pt", weights_only=True)["model"]  # noqa: E731
    assert explained([*files[:2], nested], [0.1, 0.02]) > 1 - 1e-9
    with pytest.raises(ReplayError, match=r"Checkpoint 2 holds 'model'.*Give the model's state dict alone"):
        explained([*files[:2], tmp_path / "nested.pt"], [0.1, 0.02])
    with pytest.raises(ReplayError, match="which is no file"):
        explained([*files[:2], tmp_path / "none.pt"], [0.1, 0.02])


def test_what_makes_no_sense_is_refused() -> None:
    states = train("mlp", "SGD")[:3]
    order = [[0], [1]]
    with pytest.raises(ReplayError, match="There are 1 checkpoints; expected at least two"):
        ask("mlp", "SGD", states[:1], order)
    with pytest.raises(ReplayError, match="There are rates for 3 intervals; expected 2"):
        ask("mlp", "SGD", states, order, rates=[1.0, 2.0, 3.0])
    with pytest.raises(TypeError, match="rates is a float; expected a sequence"):
        ask("mlp", "SGD", states, order, rates=0.1)
    with pytest.raises(ReplayError, match="no batches between checkpoints 1 and 2"):
        ask("mlp", "SGD", states, [[0], []])
    with pytest.raises(ReplayError, match=r"Checkpoint 1 .* lacks '1.weight'.*has 'other'"):
        ask("mlp", "SGD", [states[0], {"other": torch.zeros(1)}, states[2]], order)
    with pytest.raises(ReplayError, match=r"'3.bias' is \(4,\), and \(3,\) in the model"):
        ask("mlp", "SGD", [{**states[0], "3.bias": torch.zeros(4)}, *states[1:]], order)
    with pytest.raises(ReplayError, match="Checkpoint 0 is a list"):
        ask("mlp", "SGD", [[], *states[1:]], order)  # type: ignore[list-item]
    with pytest.raises(ReplayError, match=r"returned a tensor \(4,\); expected one number"):
        dualform.from_checkpoints(
            lambda: make("mlp"),
            states,
            [[data("mlp", 0)], [data("mlp", 1)]],
            lambda model, one: model(one[0])[:, 0],
            OPTIMIZERS["SGD"],
            MemoryBlobs(),
        )
    with pytest.raises(ReplayError, match="parameter groups with different ones"):
        dualform.from_checkpoints(
            lambda: make("mlp"),
            states,
            [[data("mlp", 0)], [data("mlp", 1)]],
            loss,
            lambda model: torch.optim.SGD([{"params": [p], "lr": 0.1 * p.dim()} for p in model.parameters()]),
            MemoryBlobs(),
            rates=[0.1, 0.1],
        )


def test_the_column_of_the_interval_is_taken() -> None:
    with pytest.raises(ReplayError, match="Give yours another name"):
        dualform.from_checkpoints(
            lambda: make("mlp"),
            train("mlp", "SGD")[:2],
            [[data("mlp", 0)]],
            loss,
            OPTIMIZERS["SGD"],
            MemoryBlobs(),
            columns=lambda one: {"interval": 3},
        )


def test_nothing_can_be_recorded_behind_checkpoints() -> None:
    states = train("mlp", "SGD")
    _, blobs = ask("mlp", "SGD", states[::6], in_order(6))
    model = make("mlp")
    model.load_state_dict(states[-1])
    with pytest.raises(ResumeError, match="was made from checkpoints"):
        dualform.record(model, OPTIMIZERS["SGD"](model), blobs, resume=True).start()
