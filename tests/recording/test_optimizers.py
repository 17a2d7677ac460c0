"""The facts of every kind of SGD step: kernels, gradients that come late or not at all, scalers, closures."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dualform
from dualform.errors import RefusedError
from dualform.recording.optimizers import kind_of, supported
from helpers.loops import (
    WITHIN,
    assert_exact,
    batches,
    counts,
    gradient_of,
    loss_of,
    mlp,
    record,
    sgd,
    state,
    train,
    worst,
)

DTYPES = list(WITHIN)
MANY = 200


def facts(memory: dualform.Memory, parameter: str, column: str) -> list[Any]:
    """Return one column of the facts of one parameter, step by step."""
    table = memory.steps().to_pydict()
    return [value for name, value in zip(table["parameter"], table[column], strict=True) if name == parameter]


@pytest.mark.mostly_slow(fast=5)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.0},
        {"nesterov": True, "weight_decay": 0.01},
        {"dampening": 0.4, "weight_decay": 0.01, "maximize": True},
    ],
    ids=["plain", "Nesterov", "maximize"],
)
def test_kernels(run: Path, dtype: torch.dtype, kernel: dict[str, bool], settings: dict[str, Any]) -> None:
    model = mlp(dtype=dtype)
    sign = -1 if settings.get("maximize") else 1

    def body(x: Tensor) -> None:
        (sign * loss_of(model(x))).backward()
        optimizer.step()

    optimizer = sgd(model, **kernel, **settings)
    memory = record(run, model, optimizer, body, steps=MANY)
    assert_exact(memory, model)
    assert set(facts(memory, "0.weight", "maximize")) == {settings.get("maximize", False)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("foreach", [True, False])
def test_parameters_without_a_gradient_in_some_steps(run: Path, dtype: torch.dtype, *, foreach: bool) -> None:
    """Momentum and decay rest while a parameter has no gradient; `None` is not zero."""
    model = mlp(dtype=dtype)
    steps = iter(range(MANY))

    def body(x: Tensor) -> None:
        loss_of(model(x)).backward()
        step = next(steps)
        if step % 3 == 0:
            model[0].weight.grad = None
        if step % 5 == 0:
            model[2].bias.grad = None
        optimizer.step()

    optimizer = sgd(model, weight_decay=0.01, nesterov=True, foreach=foreach)
    memory = record(run, model, optimizer, body, steps=MANY)
    assert_exact(memory, model)
    assert facts(memory, "0.weight", "updated")[:4] == [False, True, True, False]
    assert facts(memory, "2.bias", "updated")[:6] == [False, True, True, True, True, False]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_branches_that_are_not_always_taken(run: Path, dtype: torch.dtype) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(5, 6)
            self.left = nn.Linear(6, 3)
            self.right = nn.Linear(6, 3)
            self.taken = 0

        def forward(self, x: Tensor) -> Tensor:
            self.taken += 1
            return (self.left if self.taken % 3 else self.right)(torch.tanh(self.stem(x)))

    torch.manual_seed(0)
    model = Branches().to(dtype)
    memory = record(run, model, sgd(model, weight_decay=0.01), steps=MANY)
    assert_exact(memory, model)
    assert facts(memory, "right.weight", "updated")[:4] == [False, False, True, False]
    assert facts(memory, "right.weight", "buffer")[:6] == [False, False, False, True, True, True]  # a late first one
    assert counts(memory) == {"stem": 4 * MANY, "left": 4 * (MANY - MANY // 3), "right": 4 * (MANY // 3)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_frozen_then_unfrozen_then_frozen(run: Path, dtype: torch.dtype) -> None:
    model = mlp(dtype=dtype)
    model[0].requires_grad_(False)
    optimizer = sgd(model, weight_decay=0.01)
    inputs = batches(MANY, dtype=dtype)
    with dualform.record(model, optimizer, run):
        train(model, optimizer, inputs[:50])
        model[0].requires_grad_(True)
        train(model, optimizer, inputs[50:120])
        model[2].requires_grad_(False)
        model[0].bias.requires_grad_(False)
        train(model, optimizer, inputs[120:])
    memory = dualform.open(run)
    assert counts(memory) == {"0": 4 * 150, "2": 4 * 120}
    assert_exact(memory, model)


def test_a_group_added_later(run: Path) -> None:
    model = mlp(dtype=torch.float64)
    optimizer = sgd(model[2])
    inputs = batches(MANY, dtype=torch.float64)
    with dualform.record(model, optimizer, run, layers="*"):
        for i, x in enumerate(inputs):
            if i == 50:
                optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01, "momentum": 0.5})
            model.zero_grad()
            loss_of(model(x)).backward()
            optimizer.step()
    memory = dualform.open(run)
    assert counts(memory) == {"0": 4 * (MANY - 50), "2": 4 * MANY}
    assert_exact(memory, model)


def test_layers_outside_the_optimizer_have_no_patterns(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model[2])
    with dualform.record(model, optimizer, run, layers="*"):
        for x in batches(6):
            model.zero_grad()
            loss_of(model(x)).backward()
            optimizer.step()
    memory = dualform.open(run)
    assert counts(memory) == {"0": 0, "2": 24}
    assert memory.verify(model).passed
    torch.testing.assert_close(memory.weights()["0.weight"], model.get_parameter("0.weight").detach(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_momentum_buffer_that_is_warm_at_the_start(run: Path, dtype: torch.dtype) -> None:
    model = mlp(dtype=dtype)
    optimizer = sgd(model, momentum=0.99, weight_decay=0.01, lr=0.01)
    train(model, optimizer, batches(10, dtype=dtype))
    before = state(model)
    warm = {name: optimizer.state[p]["momentum_buffer"].clone() for name, p in model.named_parameters()}
    memory = record(run, model, optimizer, steps=MANY)
    assert_exact(memory, model)
    start = memory.at(step=1).where("step < 0").weights()  # W_0 and B_0 alone, after one step of decay and momentum
    for name, rest in start.items():
        expected = before[name] - 0.01 * (0.01 * before[name] + 0.99 * warm[name])
        torch.testing.assert_close(rest, expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_learning_rate_that_is_a_tensor(run: Path, dtype: torch.dtype) -> None:
    model = mlp(dtype=dtype)
    optimizer = sgd(model, lr=torch.tensor(0.05, dtype=dtype), foreach=False)
    assert_exact(record(run, model, optimizer, steps=MANY), model)


def test_schedules_of_rate_and_momentum(run: Path) -> None:
    model = mlp(dtype=torch.float64)
    optimizer = sgd(model, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=MANY)

    def body(x: Tensor) -> None:
        loss_of(model(x)).backward()
        optimizer.step()
        schedule.step()

    memory = record(run, model, optimizer, body, steps=MANY)
    assert len(set(facts(memory, "0.weight", "momentum"))) > 50
    assert_exact(memory, model)


def test_momentum_that_is_switched_off_and_on(run: Path) -> None:
    model = mlp(dtype=torch.float64)
    optimizer = sgd(model, weight_decay=0.01)
    inputs = batches(90, dtype=torch.float64)
    with dualform.record(model, optimizer, run):
        for momentum, part in ((0.9, inputs[:30]), (0.0, inputs[30:60]), (0.8, inputs[60:])):
            optimizer.param_groups[0]["momentum"] = momentum
            train(model, optimizer, part)
    assert_exact(dualform.open(run), model)


@pytest.mark.parametrize("keyword", [True, False])
def test_step_with_a_closure(run: Path, *, keyword: bool) -> None:
    model = mlp(dtype=torch.float64)

    def body(x: Tensor) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(x))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            return loss

        loss = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
        assert loss.item() > 0

    optimizer = sgd(model)
    memory = record(run, model, optimizer, body, steps=40)
    assert counts(memory) == {"0": 160, "2": 160}
    assert_exact(memory, model)


def test_a_closure_under_a_schedule_that_wraps_step(run: Path) -> None:
    model = mlp(dtype=torch.float64)
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)

    def body(x: Tensor) -> None:
        def closure() -> Tensor:
            loss = loss_of(model(x))
            loss.backward()
            return loss

        optimizer.step(closure)
        schedule.step()

    assert_exact(record(run, model, optimizer, body, steps=40), model)


# What is measured between backward and step --------------------------------------------------------------------------


def test_the_factor_of_clipping_is_measured(run: Path) -> None:
    model = mlp(dtype=torch.float64)
    expected = []

    def body(x: Tensor) -> None:
        loss_of(model(x)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        expected.append(min(1.0, float(0.1 / (norm + 1e-6))))
        optimizer.step()

    optimizer = sgd(model)
    memory = record(run, model, optimizer, body, steps=20)
    for name in state(model):
        measured = torch.tensor([factors[0] for factors in facts(memory, name, "factors")], dtype=torch.float64)
        torch.testing.assert_close(measured, torch.tensor(expected, dtype=torch.float64), rtol=1e-13, atol=0)
    assert min(expected) < 0.9


def test_each_parameter_and_each_backward_has_its_own_factor(run: Path) -> None:
    model = mlp(dtype=torch.float64)

    def body(x: Tensor) -> None:
        loss_of(model(x)).backward()
        gradient_of(model.get_parameter("0.weight")).mul_(0.5)
        loss_of(model(2 * x)).backward()
        gradient_of(model.get_parameter("0.weight")).mul_(-0.5)
        gradient_of(model.get_parameter("2.bias")).data.mul_(3.0)
        optimizer.step()

    optimizer = sgd(model, lr=0.01)
    memory = record(run, model, optimizer, body, steps=20)
    assert facts(memory, "0.weight", "factors")[0] == pytest.approx([-0.25, -0.5], rel=1e-12)
    assert facts(memory, "2.bias", "factors")[0] == pytest.approx([3.0, 3.0], rel=1e-12)
    assert facts(memory, "0.bias", "factors")[0] == [1.0, 1.0]
    assert_exact(memory, model)


def _overflowing(model: nn.Module, x: Tensor, step: int) -> Tensor:
    return loss_of(model(x)) * (torch.inf if step % 4 == 3 else 1.0)


@pytest.mark.mostly_slow(fast=3)
@pytest.mark.parametrize("way", ["plain", "unscale and clip", "unscale"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "foreach"])
@pytest.mark.parametrize("to_none", [True, False], ids=["None", "zeros"])
def test_gradient_scaler_with_skipped_steps(run: Path, way: str, *, fused: bool, to_none: bool) -> None:
    model = mlp()
    optimizer = sgd(model, weight_decay=0.01, **({"fused": True} if fused else {"foreach": True}))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
    scales = []
    moved = 0
    with dualform.record(model, optimizer, run):
        for step, x in enumerate(batches(60)):
            optimizer.zero_grad(set_to_none=to_none)
            before = model.get_parameter("0.weight").detach().clone()
            for part in x.chunk(2):
                scaler.scale(_overflowing(model, part, step)).backward()
            if way != "plain":
                scaler.unscale_(optimizer)
            if way == "unscale and clip":
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            moved += not torch.equal(before, model.get_parameter("0.weight"))
    assert moved == 45
    assert len(set(scales)) > 3
    memory = dualform.open(run)
    assert counts(memory) == {"0": 45 * 4, "2": 45 * 4}
    assert_exact(memory, model)
    assert memory.step == (60 if fused else 45)  # a fused step is called, and skips inside


def test_a_fused_step_that_skips_its_first_buffer(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with dualform.record(model, optimizer, run):
        scaler.scale(_overflowing(model, batches(1)[0], 3)).backward()
        with pytest.raises(RefusedError, match=r"skips the first step of fused SGD.*'0.weight' uninitialised"):
            scaler.step(optimizer)
    plain = mlp()
    optimizer = sgd(plain, fused=True, momentum=0.0)  # no buffer, no trouble
    with dualform.record(plain, optimizer, run.with_name("plain")):
        for step, x in enumerate(batches(12), start=3):
            optimizer.zero_grad()
            scaler.scale(_overflowing(plain, x, step)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert_exact(dualform.open(run.with_name("plain")), plain)


def test_two_optimizers_of_one_model(run: Path, tmp_path: Path) -> None:
    """Where only one is recorded, a layer that the other trains is refused; alone, its own layers are exact."""
    model = mlp()
    mine, other = sgd(model[0]), sgd(model[2])

    def recording(path: Path, layers: str | None) -> None:
        with dualform.record(model, mine, path, layers=layers):
            for x in batches(6):
                mine.zero_grad()
                other.zero_grad()
                loss_of(model(x)).backward()
                mine.step()
                other.step()

    with pytest.raises(RefusedError, match=r"'2.weight', '2.bias' changed .* optimizer that was not handed to record"):
        recording(run, "*")
    with pytest.warns(UserWarning, match=r"'2.weight', '2.bias' changed while the model was recorded"):
        recording(tmp_path / "alone", "0")
    assert_exact(dualform.open(tmp_path / "alone"), model)


def test_supported_optimizers_are_found_by_type() -> None:
    assert supported() == ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop", "SGD")
    parameters = [nn.Parameter(torch.zeros(1, 1))]
    for name in supported():
        assert kind_of(getattr(torch.optim, name)(parameters, lr=0.1)) is not None
    assert kind_of(torch.optim.Rprop(parameters)) is None


@pytest.mark.slow
def test_long_momentum_in_float32(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model, lr=1e-4, momentum=0.999)
    with dualform.record(model, optimizer, run):
        train(model, optimizer, batches(1000))
    assert worst(dualform.open(run), model) <= 1e-5


class AdamW(torch.optim.Optimizer):
    """An optimizer of somebody else that torch has the name of too."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step by the sign."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * parameter.grad.sign()


def test_an_optimizer_is_not_taken_for_torchs_of_the_same_name(run: Path) -> None:
    model = nn.Linear(5, 3)
    with pytest.raises(RefusedError, match="AdamW is not an optimizer whose coefficients are known"):
        dualform.record(model, AdamW(model.parameters()), run).__enter__()
    optimizer = AdamW(model.parameters())
    with dualform.record(model, optimizer, run, layers={"*": "keys"}):
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
    memory = dualform.open(run)
    assert memory._run.description.optimizers == (f"{__name__}:AdamW",)
    assert memory.info().optimizers == ("AdamW",)
    assert not any(memory._run.is_replayed(name) for name in ("weight", "bias"))
