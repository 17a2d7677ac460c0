"""Adam and its relatives: weights, masks, horizons, contributions and replays against live training and dense loops."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler

import dualform
from dualform.errors import QueryError, ResumeError
from dualform.identity.families import optimizer_kinds
from dualform.identity.families.elementwise import ElementwiseKind
from dualform.identity.families.optimizer_replay import OptimizerReplay, Share
from dualform.store.memory_blobs import MemoryBlobs
from dualform.store.reader import Run
from helpers.folds import folded
from helpers.loops import state

SETTINGS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {"lr": 1e-2}),
    "Adam, decay, amsgrad": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.01, "amsgrad": True}),
    "Adam, decoupled": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "AdamW, amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-2, "weight_decay": 0.01}),
    "NAdam, decoupled": (torch.optim.NAdam, {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "RAdam": (torch.optim.RAdam, {"lr": 1e-2, "weight_decay": 0.01}),
    "Adamax": (torch.optim.Adamax, {"lr": 1e-2, "weight_decay": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3}),
    "RMSprop, all": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.9, "centered": True, "weight_decay": 0.01}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 3e-2, "lr_decay": 0.01, "weight_decay": 0.01}),
    "Adagrad, filled": (torch.optim.Adagrad, {"lr": 3e-2, "initial_accumulator_value": 0.1}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0, "weight_decay": 0.01}),
}
STEPS = 20
WITHIN = {torch.float32: 1e-5, torch.float64: 1e-12}


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def batch(step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), inputs[:, :3].argmax(1)


def train(
    folder: Path | MemoryBlobs,
    optimizer_type: type[torch.optim.Optimizer],
    settings: dict[str, Any],
    *,
    dtype: torch.dtype = torch.float64,
    tricks: bool = True,
    dtype_stored: Any = None,
) -> tuple[nn.Sequential, dict[int, dict[str, Tensor]]]:
    """Train with a schedule, clipping and accumulation; return the model, and its state after each step."""
    model = network(dtype)
    optimizer = optimizer_type(model.parameters(), **settings)
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, STEPS * 2)
    checkpoints = {0: state(model)}
    with dualform.record(model, optimizer, folder, shard_bytes=4000, dtype=dtype_stored) as recorder:
        for step in range(STEPS):
            inputs, labels = batch(step, dtype)
            optimizer.zero_grad()
            for part, target in zip(inputs.split(4), labels.split(4), strict=True) if tricks else [(inputs, labels)]:
                recorder.annotate(label=target, sample=torch.arange(len(part)) + step % 5)
                functional.cross_entropy(model(part), target).backward()
            if tricks:
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            schedule.step()
            checkpoints[step + 1] = state(model)
    return model, checkpoints


@functools.cache
def trained(name: str, dtype: torch.dtype) -> tuple[dualform.Memory, nn.Sequential, dict[int, dict[str, Tensor]]]:
    """Train with all tricks, once for several tests; return the memory, the model, and its state after each step."""
    blobs = MemoryBlobs()
    model, checkpoints = train(blobs, *SETTINGS[name], dtype=dtype)
    return dualform.open(blobs), model, checkpoints


@pytest.mark.mostly_slow(fast=4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", SETTINGS)
def test_weights_outputs_and_horizons(name: str, dtype: torch.dtype) -> None:
    memory, model, checkpoints = trained(name, dtype)
    found = memory.verify(model)
    assert found.passed
    assert all((layer.error or 0) <= WITHIN[dtype] for layer in found.layers)
    for step in (0, 1, 17, STEPS - 1):
        assert memory.at(step=step).verify(checkpoints[step]).passed, step
    assert not memory.at(step=17).verify(checkpoints[19]).passed
    inputs, _ = batch(1000, dtype)
    spotlight = memory.attend(model, inputs)
    torch.testing.assert_close(spotlight["2"].output(), model(inputs).detach(), rtol=1e-4, atol=10 * WITHIN[dtype])


@pytest.mark.mostly_slow(fast=3)
@pytest.mark.parametrize("name", SETTINGS)
def test_shares_add_up_and_contributions_are_what_they_sum_to(name: str) -> None:
    memory, model, _ = trained(name, torch.float64)
    chosen, rest, whole = (m.shares() for m in (memory.where(label=[1]), memory.without(label=[1]), memory))
    for parameter, share in whole.items():
        torch.testing.assert_close(chosen[parameter] + rest[parameter], share, rtol=1e-9, atol=1e-12)
    inputs, _ = batch(1000, torch.float64)
    layer = memory.attend(model, inputs)["2"]
    each = layer.contributions()  # by the backward recursion
    totals = layer.totals("label", of="contribution")  # by the forward shares
    labels = memory.patterns("2", columns=["label"])["label"].to_numpy()
    for group, label in enumerate(totals.groups):
        torch.testing.assert_close(
            each[:, torch.from_numpy(labels == label)].sum(1), totals.values[:, group], rtol=1e-8, atol=1e-11
        )
    torch.testing.assert_close(layer.start() + each.sum(1), model(inputs).detach(), rtol=1e-8, atol=1e-11)


def test_top_contributions_equal_the_dense_ones(run: Path) -> None:
    model, _ = train(run, *SETTINGS["AdamW"])
    inputs, _ = batch(1000, torch.float64)
    for memory in (dualform.open(run), dualform.open(run).where("label > 0").at(step=18)):
        layer = memory.attend(model, inputs, other_model=True)["0"]
        each = layer.contributions()
        units = torch.arange(len(inputs)) % 5
        mine = each.gather(2, units[:, None, None].expand(-1, each.shape[1], 1))[:, :, 0]
        for largest in (True, False):
            best = mine.topk(4, dim=1, largest=largest).values
            found = layer.top(4, of="contribution", unit=units, largest=largest)
            torch.testing.assert_close(found.values[:, 0], best, rtol=1e-9, atol=1e-12)
        samples = memory.patterns("0", columns=["sample"])["sample"].to_numpy()
        sums = torch.stack([mine[:, torch.from_numpy(samples == s)].sum(1) for s in sorted(set(samples.tolist()))], 1)
        best = sums.topk(2, dim=1).values
        found = layer.top(2, of="contribution", per="sample", unit=units)
        torch.testing.assert_close(found.values[:, 0], best, rtol=1e-9, atol=1e-12)


@pytest.mark.mostly_slow(fast=4)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_replaying_torchs_own_steps_is_equal_to_the_bit(run: Path, name: str, dtype: torch.dtype) -> None:
    model, _ = train(run, *SETTINGS[name], dtype=dtype, tricks=False)
    stored = Run(run)
    found = folded(stored, ["0", "2"], horizon=STEPS)
    for parameter, tensor in model.named_parameters():
        assert torch.equal(found[parameter].parameter, tensor.detach()), parameter


def test_shares_follow_the_naive_simulation() -> None:
    """Each share pushed through its own optimizer would differ; pushed through the shared moments it must add up."""
    for name, (optimizer_type, settings) in SETTINGS.items():
        torch.manual_seed(1)
        initial = torch.randn(3, 2, dtype=torch.float64)
        live = nn.Parameter(initial.clone())
        optimizer = optimizer_type([live], **settings)
        kind = optimizer_kinds()[optimizer_type]
        assert isinstance(kind, ElementwiseKind)
        again = OptimizerReplay(kind, initial, dict(optimizer.state[live]))
        start, first, second = Share(initial.clone()), Share(initial * 0), Share(initial * 0)
        for _ in range(40):
            one, two = torch.randn(2, 3, 2, dtype=torch.float64)
            live.grad = one + two
            optimizer.step()
            linear = again.step({key: optimizer.param_groups[0][key] for key in kind.settings}, one + two)
            start.step(linear, None)
            first.step(linear, one)
            second.step(linear, two)
        rebuilt = start.weight + first.weight + second.weight
        assert torch.equal(again.parameter, live), name
        torch.testing.assert_close(rebuilt, live.detach(), rtol=1e-10, atol=1e-12, msg=name)


def test_warm_state_is_part_of_the_start(run: Path) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)

    def step(number: int) -> None:
        inputs, labels = batch(number, torch.float64)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    for number in range(10):
        step(number)
    with dualform.record(model, optimizer, run):
        for number in range(10, 30):
            step(number)
    found = dualform.open(run).verify(model)
    assert found.passed
    assert all((layer.error or 0) < 1e-12 for layer in found.layers)


def test_a_parameter_without_a_gradient_in_some_steps(run: Path) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with dualform.record(model, optimizer, run):
        for number in range(20):
            inputs, labels = batch(number, torch.float64)
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            if number % 3 == 0:
                model[0].weight.grad = None
            optimizer.step()
    assert dualform.open(run).verify(model).passed


def test_resume_proves_the_moments(run: Path) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def steps(recorder: Any, numbers: range) -> None:
        for number in numbers:
            inputs, labels = batch(number, torch.float64)
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()

    with dualform.record(model, optimizer, run) as recorder:
        steps(recorder, range(12))
    spoilt = {k: v.clone() for k, v in optimizer.state[model.get_parameter("0.weight")].items()}
    optimizer.state[model.get_parameter("0.weight")]["exp_avg"] *= 2
    with pytest.raises(ResumeError, match=r"exp_avg of '0.weight' is not that of step 12"):
        dualform.record(model, optimizer, run, resume=True).__enter__()
    optimizer.state[model.get_parameter("0.weight")].update(spoilt)
    with dualform.record(model, optimizer, run, resume=True) as recorder:
        steps(recorder, range(12, 20))
    assert dualform.open(run).verify(model).passed


def test_a_weight_edited_by_a_thousandth_does_not_verify(run: Path) -> None:
    model, _ = train(run, *SETTINGS["Adam"], dtype=torch.float32)
    with torch.no_grad():
        model.get_parameter("0.weight").mul_(1.001)
    assert not dualform.open(run).verify(model).passed


def test_totals_by_too_many_groups_are_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = train(run, *SETTINGS["Adam"])
    monkeypatch.setattr("dualform.attend.layer_plans.MAX_ANSWER_BYTES", 1000)
    layer = dualform.open(run).attend(model, batch(0, torch.float64)[0][:1])["0"]
    with pytest.raises(QueryError, match="totals of contributions"):
        layer.totals("step", of="contribution")


@pytest.mark.parametrize("optimizer_type", [torch.optim.SGD, torch.optim.AdamW])
def test_outputs_of_layers_that_share_a_weight(run: Path, optimizer_type: Callable[..., torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    model[2].weight = model[0].weight
    optimizer = optimizer_type(model.parameters(), lr=0.05)
    with dualform.record(model, optimizer, run) as recorder:
        for step in range(12):
            inputs = batch(step, torch.float64)[0][:, :4]
            recorder.annotate(half=step % 2)
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    memory = dualform.open(run)
    assert memory.verify(model).passed
    inputs = batch(99, torch.float64)[0][:, :4]
    for view in (memory, memory.where(half=1), memory.at(step=7)):
        weights = view.weights()
        found = view.attend(model, inputs, other_model=True)["2"]
        hidden = model[1](model[0](inputs)).detach()
        expected = hidden @ weights["0.weight"].T + weights["2.bias"]
        torch.testing.assert_close(found.output(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer_type", "settings"),
    [
        (torch.optim.AdamW, {"lr": 1e-3}),
        (torch.optim.AdamW, {"lr": 3e-4, "weight_decay": 0.1}),
        (torch.optim.NAdam, {"lr": 1e-3, "weight_decay": 0.01, "decoupled_weight_decay": True}),
        (torch.optim.Adam, {"lr": 1e-3, "weight_decay": 1e-3, "betas": (0.99, 0.9999)}),
        (torch.optim.RMSprop, {"lr": 1e-4, "momentum": 0.99}),
    ],
    ids=str,
)
def test_small_rates_over_many_steps_in_float32(
    run: Path, optimizer_type: type[torch.optim.Optimizer], settings: dict[str, Any]
) -> None:
    """A number that the step rounds and we do not is off by the same little in every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = optimizer_type(model.parameters(), **settings)
    with dualform.record(model, optimizer, run):
        for step in range(600):
            inputs, labels = batch(step % 50, torch.float32)
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    found = dualform.open(run).verify(model)
    assert found.passed
    assert all((layer.error or 0) < 5e-6 for layer in found.layers), found


def test_float16_patterns_of_a_replayed_optimizer(run: Path) -> None:
    model, _ = train(run, *SETTINGS["AdamW"], dtype=torch.float32, dtype_stored="float16")
    found = dualform.open(run).verify(model)
    assert found.passed
    assert all(1e-6 < (layer.error or 0) < 2e-3 for layer in found.layers)
