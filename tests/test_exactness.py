"""The rebuilt weight equals the live one: SGD's settings × networks × dtypes, and every pattern's own share."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dualform
from dualform.recording.baseline import Baseline
from helpers.loops import WITHIN, assert_exact, batches, leftovers, loss_of, mlp, record, sgd, state
from helpers.pairs import pairwise
from helpers.reference import Batch, Reference

STEPS = 40  # of which checks see all of the first 20, and some of the others
CHECKPOINTS = (0, 1, 17, 39)


class Twice(nn.Module):
    """A network that uses one of its layers twice in a forward pass."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6, bias=bias)
        self.again = nn.Linear(6, 6, bias=bias)
        self.last = nn.Linear(6, 3, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.again(torch.tanh(self.first(x)))
        return self.last(torch.tanh(self.again(torch.tanh(hidden))))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "2-D with bias": (lambda: mlp(), (8, 5)),
    "2-D without bias": (lambda: mlp(bias=False), (8, 5)),
    "3-D with bias": (lambda: mlp(inplace=True), (3, 4, 5)),
    "3-D without bias": (lambda: mlp(bias=False), (3, 4, 5)),
    "used twice, 2-D with bias": (lambda: Twice(bias=True), (8, 5)),
    "used twice, 3-D without bias": (lambda: Twice(bias=False), (3, 4, 5)),
}

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"lr": 0.3},
    "momentum": {"lr": 0.05, "momentum": 0.9},
    "dampening": {"lr": 0.2, "momentum": 0.9, "dampening": 0.5},
    "Nesterov": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
    "weight decay": {"lr": 0.3, "weight_decay": 0.01},
    "everything": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.005},
    "two groups": {},
}


@dataclass
class Trained:
    """A recorded run, its live model, and the checkpoints kept on the way."""

    memory: dualform.Memory
    model: nn.Module
    dtype: torch.dtype
    shape: tuple[int, ...]
    checkpoints: dict[int, dict[str, Tensor]] = field(default_factory=dict)


def _optimizer(model: nn.Module, settings: str) -> torch.optim.SGD:
    if settings == "two groups":
        first, *others = model.parameters()
        return torch.optim.SGD(
            [
                {"params": [first], "lr": 0.1, "momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
                {"params": others, "lr": 0.05, "momentum": 0.9, "dampening": 0.2},
            ]
        )
    return torch.optim.SGD(model.parameters(), **SETTINGS[settings])


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((settings, network, dtype), id=f"{settings}, {network}, {str(dtype)[6:]}")
        for settings, network, dtype in pairwise(SETTINGS, NETWORKS, WITHIN)
    ],
)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    settings, network, dtype = request.param
    make, shape = NETWORKS[network]
    torch.manual_seed(0)
    model = make().to(dtype)
    optimizer = _optimizer(model, settings)
    everything = settings == "everything"
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS) if everything else None
    folder = tmp_path_factory.mktemp("exact") / "run"
    checkpoints = {0: state(model)}
    with dualform.record(model, optimizer, folder):
        for step, x in enumerate(batches(STEPS, *shape, dtype=dtype), start=1):
            optimizer.zero_grad()
            for part in x.chunk(2) if everything else (x,):
                loss_of(model(part)).backward()
            if everything:
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            if step in CHECKPOINTS:
                checkpoints[step] = state(model)
    yield Trained(dualform.open(folder), model, dtype, shape, checkpoints)
    assert not leftovers(model, optimizer)


@pytest.mark.mostly_slow(fast=17)
def test_rebuilds_the_live_weight(trained: Trained) -> None:
    verification = trained.memory.verify(trained.model)
    assert verification.passed
    for layer in verification.layers:
        assert layer.patterns >= STEPS * math.prod(trained.shape[:-1])
        for check in layer.parameters:
            assert check.change > 0.01  # or nothing would be shown
            assert check.relative <= WITHIN[trained.dtype]


@pytest.mark.mostly_slow(fast=17)
def test_rebuilds_every_checkpoint(trained: Trained) -> None:
    start = trained.checkpoints[0]
    for step, checkpoint in trained.checkpoints.items():
        view = trained.memory.at(step=step)
        assert view.verify(checkpoint).passed
        for name, rebuilt in view.weights().items():
            if not step:
                torch.testing.assert_close(rebuilt, checkpoint[name], rtol=0, atol=0)
                continue
            change = float((checkpoint[name].double() - start[name].double()).norm())
            error = float((rebuilt.double() - checkpoint[name].double()).norm())
            # A single step's change is not much larger than the rounding of the weight that it was added to.
            rounding = 2 * torch.finfo(trained.dtype).eps * float(checkpoint[name].double().norm())
            assert error <= WITHIN[trained.dtype] * change + rounding


@pytest.mark.mostly_slow(fast=17)
def test_output_is_the_modules(trained: Trained) -> None:
    inputs = batches(1, *trained.shape, dtype=trained.dtype, seed=9)[0]
    seen: dict[str, list[Tensor]] = {}
    handles = [
        trained.model.get_submodule(name).register_forward_hook(
            lambda module, args, output, name=name: seen.setdefault(name, []).append(output.clone())
        )
        for name in trained.memory.layers
    ]
    with torch.no_grad():
        trained.model(inputs)
    for handle in handles:
        handle.remove()
    spotlight = trained.memory.attend(trained.model, inputs)
    for name in trained.memory.layers:
        output = spotlight[name].output()
        live = torch.stack(seen[name]) if len(seen[name]) > 1 else seen[name][0]
        atol = 1e-5 if trained.dtype is torch.float32 else 1e-13
        torch.testing.assert_close(output.reshape(-1), live.reshape(-1), rtol=0, atol=atol)


# Every pattern's own share, against the reference ------------------------------------------------------------------


@pytest.mark.parametrize("settings", [name for name in SETTINGS if name != "two groups"])
def test_every_pattern_has_the_references_share(run: Path, settings: str) -> None:
    model = mlp(dtype=torch.float64)
    reference = Reference(model)
    chosen = SETTINGS[settings]
    optimizer = torch.optim.SGD(model.parameters(), **chosen)
    clip = 0.5 if settings == "everything" else None
    with dualform.record(model, optimizer, run):
        for step in range(7):
            parts = batches(2, 3, 5, dtype=torch.float64, seed=step)
            optimizer.param_groups[0]["lr"] = lr = chosen["lr"] * (1 - step / 10)
            optimizer.zero_grad()
            for x in parts:
                loss_of(model(x)).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            reference.step([Batch(x, loss_of) for x in parts], {**chosen, "lr": lr}, max_norm=clip)
    memory = dualform.open(run)
    for step, expected in enumerate(reference.history):
        torch.testing.assert_close(memory.at(step=step).weights(), expected, rtol=0, atol=1e-13)
    for name, layer in reference.layers.items():
        queries = batches(1, 4, layer.in_features, dtype=torch.float64)[0]
        spotlight = memory.attend(queries={name: queries})[name]
        torch.testing.assert_close(spotlight.attention(), reference.attention(name, queries), rtol=0, atol=1e-13)
        contributions = reference.contributions(name, queries)
        torch.testing.assert_close(spotlight.contributions(), contributions, rtol=0, atol=1e-14)
        torch.testing.assert_close(spotlight.output(), reference.output(name, queries), rtol=0, atol=1e-13)
        table = memory.patterns(name).to_pydict()
        addresses = [(p.step, p.micro, p.call, p.row, p.position) for p in reference.of(name)]
        assert list(zip(*(table[c] for c in ("step", "micro", "call", "row", "position")), strict=True)) == addresses
    early = reference.shares(lambda pattern: pattern.step < 3)
    torch.testing.assert_close(memory.where("step < 3").shares(), early, rtol=0, atol=1e-14)
    kept = reference.weights(lambda pattern: pattern.micro == 1)
    torch.testing.assert_close(memory.where(micro=1).weights(), kept, rtol=0, atol=1e-13)


def test_reference_trains_as_torch_does() -> None:
    """The reference is no help unless it is right: it takes the same steps as torch.optim.SGD."""
    model = mlp(dtype=torch.float64)
    reference = Reference(model)
    settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.02, "maximize": True}
    optimizer = torch.optim.SGD(model.parameters(), **settings)
    for x in batches(5, dtype=torch.float64):
        optimizer.zero_grad()
        loss_of(model(x)).backward()
        optimizer.step()
        reference.step([Batch(x, loss_of)], settings)
    torch.testing.assert_close(reference.weights(), state(model), rtol=0, atol=1e-14)


# What `verify` passes and fails ------------------------------------------------------------------------------------


@pytest.mark.parametrize("exponent", range(1, 7))
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_verify_passes_every_learning_rate_and_fails_an_edited_weight(
    run: Path, exponent: int, momentum: float
) -> None:
    model = mlp()
    optimizer = sgd(model, lr=10.0**-exponent, momentum=momentum)
    memory = record(run, model, optimizer, steps=60)
    assert memory.verify(model).passed
    assert memory.verify().passed  # against the parameters that were stored at the end
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            before = parameter.clone()
            parameter.mul_(1.001)
            failed = memory.verify(model)
            parameter.copy_(before)
        assert not failed.passed
        wrong = [check.parameter for layer in failed.layers for check in layer.parameters if not check.passed]
        assert wrong == [name]


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the recorder overlook changes that no step made: `verify` has to find them by itself."""
    monkeypatch.setattr(Baseline, "changed", lambda self, **_: [])


@pytest.mark.usefixtures("unwatched")
def test_verify_fails_a_weight_edited_between_steps(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model, lr=0.01)

    def body(x: Tensor) -> None:
        loss_of(model(x)).backward()
        optimizer.step()
        if len(edits) == 20:
            with torch.no_grad():
                model.get_parameter("0.weight").mul_(1.001)
        edits.append(1)

    edits: list[int] = []
    memory = record(run, model, optimizer, body, steps=40)
    assert not memory.verify(model).passed
    assert not memory.verify().passed


@pytest.mark.usefixtures("unwatched")
def test_verify_fails_a_weight_decay_outside_the_optimizer(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)

    def body(x: Tensor) -> None:
        loss_of(model(x)).backward()
        optimizer.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 - 1e-4)

    assert not record(run, model, optimizer, body, steps=20).verify(model).passed


def test_missing_patterns_are_missed(run: Path) -> None:
    """The matrix above can fail: without one step's patterns nothing is rebuilt."""
    model = mlp()
    memory = record(run, model, sgd(model), steps=50)
    assert_exact(memory, model)
    without = memory.without(step=17).weights()
    live = state(model)
    change = float((live["0.weight"] - memory.at(step=0).weights()["0.weight"]).norm())
    assert float((without["0.weight"] - live["0.weight"]).norm()) > 1e-3 * change
