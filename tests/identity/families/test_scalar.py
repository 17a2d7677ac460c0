"""Coefficients against torch.optim.SGD itself, made to show them.

SGD is linear. Give it a vector parameter that starts as the first unit vector, let step s see the unit vector of s as
its gradient (and a warm buffer be one too): the parameter at the end *is* the list of its coefficients.
"""

from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dualform.errors import FormatError
from dualform.identity.families import Coefficients, Facts, derive, optimizer_kinds
from dualform.identity.families.optimizer_kind import OptimizerKind
from dualform.identity.families.optimizer_replay import OptimizerReplay, Share

Step = dict[str, Any]
DEFAULTS: Step = {
    "lr": 0.1,
    "momentum": 0.0,
    "dampening": 0.0,
    "weight_decay": 0.0,
    "nesterov": False,
    "maximize": False,
    "updated": True,
}


def torch_coefficients(steps: list[Step], *, warm: bool, dtype: torch.dtype, **kernel: bool) -> tuple[Tensor, Tensor]:
    """Return what torch makes of W_0, of a warm buffer and of every gradient: in the parameter, and in its buffer."""
    parameter = torch.nn.Parameter(torch.eye(len(steps) + 2, dtype=dtype)[0].clone())
    optimizer = torch.optim.SGD([parameter], lr=0.1, **kernel)
    if warm:
        optimizer.state[parameter]["momentum_buffer"] = torch.eye(len(steps) + 2, dtype=dtype)[1].clone()
    for number, step in enumerate(steps):
        optimizer.param_groups[0].update({k: v for k, v in step.items() if k != "updated"})
        parameter.grad = torch.eye(len(steps) + 2, dtype=dtype)[number + 2].clone() if step["updated"] else None
        optimizer.step()
    buffer = optimizer.state[parameter].get("momentum_buffer")
    return parameter.detach(), torch.zeros_like(parameter) if buffer is None else buffer


def facts_of(steps: list[Step], *, warm: bool, dtype: str) -> Facts:
    """Return the facts that a recorder would log of these steps."""
    buffered = warm
    rows: list[tuple[int, Step]] = []
    for number, step in enumerate(steps):
        if step["updated"]:
            rows.append((number, {**step, "buffer": buffered}))
            buffered = buffered or step["momentum"] != 0.0
    names = [name for name in (*DEFAULTS, "buffer") if name != "updated"]
    return Facts(
        optimizer="SGD",
        dtype=dtype,
        step=np.array([number for number, _ in rows], dtype=np.int64),
        settings={name: np.array([row[name] for _, row in rows]) for name in names},
    )


def as_vector(coefficients: Coefficients) -> Tensor:
    return torch.tensor([coefficients.start, coefficients.buffer, *coefficients.step], dtype=torch.float64)


@st.composite
def schedules(draw: st.DrawFn) -> list[Step]:
    """Draw any SGD schedule; momentum comes and goes, as do gradients."""
    steps = []
    for _ in range(draw(st.integers(0, 12))):
        momentum = draw(st.sampled_from([0.0, 0.5, 0.9]))
        nesterov = momentum > 0 and draw(st.booleans())
        steps.append(
            {
                "lr": draw(st.floats(0.0, 0.5)),
                "momentum": momentum,
                "dampening": 0.0 if nesterov else draw(st.sampled_from([0.0, 0.3, 1.0])),
                "weight_decay": draw(st.sampled_from([0.0, 0.1, 0.5])),
                "nesterov": nesterov,
                "maximize": draw(st.booleans()),
                "updated": draw(st.integers(0, 4)) > 0,
            }
        )
    return steps


@given(steps=schedules(), warm=st.booleans(), foreach=st.booleans())
@settings(max_examples=150)
def test_any_schedule_gives_torchs_coefficients(steps: list[Step], *, warm: bool, foreach: bool) -> None:
    facts = facts_of(steps, warm=warm, dtype="float64")
    for horizon in {0, len(steps) // 2, len(steps)}:
        parameter, buffer = torch_coefficients(steps[:horizon], warm=warm, dtype=torch.float64, foreach=foreach)
        found = derive(facts, horizon=horizon)
        assert found.step.shape == (horizon,)
        torch.testing.assert_close(as_vector(found), parameter, rtol=1e-13, atol=1e-15)
        of_buffer = as_vector(derive(facts, horizon=horizon, of="buffer"))
        if warm or facts.settings["momentum"][: np.searchsorted(facts.step, horizon)].any():
            torch.testing.assert_close(of_buffer, buffer, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.5},
        {"momentum": 0.9, "nesterov": True},
        {"weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True},
    ],
    ids=str,
)
def test_fused_steps_have_the_same_coefficients(setting: Step) -> None:
    steps = [{**DEFAULTS, **setting, "lr": 0.1 / (1 + i)} for i in range(10)]
    parameter, _ = torch_coefficients(steps, warm=False, dtype=torch.float64, fused=True)
    found = derive(facts_of(steps, warm=False, dtype="float64"), horizon=10)
    torch.testing.assert_close(as_vector(found), parameter, rtol=1e-13, atol=1e-15)


def test_plain_sgd_by_hand() -> None:
    steps = [{**DEFAULTS, "lr": lr} for lr in (0.1, 0.2, 0.4)]
    found = derive(facts_of(steps, warm=False, dtype="float64"), horizon=2)
    assert found.start == 1.0
    assert found.buffer == 0.0
    np.testing.assert_allclose(found.step, [-0.1, -0.2], rtol=0, atol=0)


def test_momentum_goes_on_changing_a_patterns_share() -> None:
    steps = [{**DEFAULTS, "lr": 1.0, "momentum": 0.5}] * 3
    facts = facts_of(steps, warm=False, dtype="float64")
    shares = [derive(facts, horizon=horizon).step[0] for horizon in (1, 2, 3)]
    np.testing.assert_allclose(shares, [-1.0, -1.5, -1.75], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["momentum", "weight_decay", "lr", "dampening"])
def test_settings_are_rounded_to_the_parameters_dtype(name: str) -> None:
    """Float32 steps round their settings; over many steps that shows, and is undone by rounding them first."""
    setting = {"lr": 1e-3, "momentum": 0.999, name: {"lr": 3e-3, "dampening": 0.3}.get(name, 0.999)}
    steps = [{**DEFAULTS, **setting}] * 400
    parameter, _ = torch_coefficients(steps, warm=False, dtype=torch.float32)
    rounded = as_vector(derive(facts_of(steps, warm=False, dtype="float32"), horizon=400))
    unrounded = as_vector(derive(facts_of(steps, warm=False, dtype="float64"), horizon=400))
    live = parameter.double()
    assert (rounded - live).norm() < 2e-6 * live.norm()
    assert (rounded - live).norm() < (unrounded - live).norm()


def test_optimizers_without_a_family_are_named() -> None:
    assert [kind.name for kind in optimizer_kinds().values() if kind.has_coefficients] == ["torch.optim:SGD"]
    with pytest.raises(FormatError, match=r"'Adam'.*known for SGD"):
        derive(Facts("Adam", "float32", np.zeros(0, dtype=np.int64), {}), horizon=0)


def test_what_dampening_leaves_is_rounded_too() -> None:
    steps = [{**DEFAULTS, "lr": 1.0, "momentum": 0.5, "dampening": 0.3}]
    found = derive(facts_of(steps, warm=True, dtype="float32"), horizon=1)
    assert found.step[0] == -float(np.float32(0.7)) != -0.7


def folded(steps: list[Step], *, warm: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return what SGD's step maps make of W_0, of a warm buffer and of every gradient, and the replayed parameter.

    The parts are those of `torch_coefficients`: each is one share, moved by every step with its own gradient alone.
    """
    kind = optimizer_kinds()[torch.optim.SGD]
    count = len(steps) + 2
    unit = torch.eye(count, dtype=torch.float64)
    warm_state = {"momentum_buffer": unit[1].to(dtype)} if warm else {}
    replay = OptimizerReplay(kind, unit[0].to(dtype), warm_state)
    shares = [Share(torch.zeros(count, dtype=torch.float64)) for _ in range(count)]
    shares[0] = Share(unit[0].clone())
    shares[1] = Share(torch.zeros(count, dtype=torch.float64), unit[1].clone() if warm else None)
    for number, step in enumerate(steps):
        if not step["updated"]:
            continue
        row = {**step, "buffer": "momentum_buffer" in replay.state}
        linear = replay.step(kind.decode(row), unit[number + 2].to(dtype))
        for place, share in enumerate(shares):
            share.step(linear, unit[place] if place == number + 2 else None)
    weights = torch.stack([share.weight for share in shares]).sum(dim=0)
    averages = torch.stack([share.average for share in shares]).sum(dim=0)
    return weights, averages, replay.parameter.detach()


@settings(max_examples=60)
@given(schedules(), st.booleans())
def test_step_maps_are_the_optimizer_and_the_coefficients(steps: list[Step], warm: bool) -> None:
    weight, buffer, replayed = folded(steps, warm=warm, dtype=torch.float64)
    parameter, live_buffer = torch_coefficients(steps, warm=warm, dtype=torch.float64)
    assert torch.equal(replayed, parameter)
    torch.testing.assert_close(weight, parameter, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(buffer, live_buffer, rtol=1e-12, atol=1e-12)
    facts = facts_of(steps, warm=warm, dtype="float64")
    targets: list[tuple[Tensor, Literal["parameter", "buffer"]]] = [(weight, "parameter"), (buffer, "buffer")]
    for found, of in targets:
        derived = as_vector(derive(facts, horizon=len(steps), of=of))
        if not warm:
            derived[1] = 0.0  # there is no buffer that this would multiply
        torch.testing.assert_close(found, derived, rtol=1e-12, atol=1e-12)


def test_step_maps_are_rounded_as_the_step_is() -> None:
    steps = [{**DEFAULTS, "lr": 3e-3, "momentum": 0.999, "weight_decay": 0.3, "dampening": 0.3}] * 200
    weight, _, replayed = folded(steps, warm=False, dtype=torch.float32)
    derived = as_vector(derive(facts_of(steps, warm=False, dtype="float32"), horizon=200))
    derived[1] = 0.0
    torch.testing.assert_close(weight, derived, rtol=1e-12, atol=1e-12)
    assert (weight - replayed.double()).norm() < 2e-6 * weight.norm()


def test_a_buffer_that_was_cleared_in_training_is_cleared_in_the_replay() -> None:
    kind = optimizer_kinds()[torch.optim.SGD]
    row = {**DEFAULTS, "momentum": 0.9, "dampening": 0.5}
    replay = OptimizerReplay(kind, torch.zeros(1, dtype=torch.float64), {})
    one = torch.ones(1, dtype=torch.float64)
    for buffer in (False, True, False):
        linear = replay.step(kind.decode({**row, "buffer": buffer}), one.clone())
    assert linear.alpha == 0.0
    assert float(replay.state["momentum_buffer"]) == 1.0, "a new buffer is the gradient itself"


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_rate_from_settings_is_the_rate_along_a_gradient(nesterov: bool) -> None:
    step = {**DEFAULTS, "momentum": 0.9, "dampening": 0.0 if nesterov else 0.4, "nesterov": nesterov, "maximize": True}
    facts = facts_of([{**step, "weight_decay": 0.01}] * 2, warm=True, dtype="float64")
    kind = optimizer_kinds()[torch.optim.SGD]
    row = {name: column[1].item() for name, column in facts.settings.items()}
    gradient = torch.tensor([1.0, -2.0], dtype=torch.float64)
    taken = OptimizerReplay(kind, gradient, {"momentum_buffer": gradient}).step(
        kind.decode({**row, "weight_decay": 0.0}), gradient
    )
    measured, known = taken.rate(gradient), kind.setting_rates(facts)
    assert known is not None
    assert measured.along / measured.square == pytest.approx(known.rate[1], rel=1e-12)
    np.testing.assert_allclose(known.decay, 0.01 * np.abs(known.rate), rtol=1e-12)


@pytest.mark.parametrize("kind", optimizer_kinds().values(), ids=lambda kind: kind.name)
def test_settings_of_a_whole_group_are_those_of_each_parameter(kind: OptimizerKind[Any]) -> None:
    optimizer = kind.make(torch.zeros(2, 3))
    group = optimizer.param_groups[0]
    warm, cold = torch.zeros(2, 3), torch.zeros(2, 3)
    states: dict[torch.Tensor, dict[str, Any]] = {warm: {"momentum_buffer": torch.zeros(2, 3)}}
    for known in (states, {}):
        one_by_one = [kind.encode(group, known.get(parameter, {})) for parameter in (warm, cold)]
        assert list(kind.encode_all(group, known, [warm, cold])) == one_by_one
