"""`verify` where rounding is all there is: correct runs pass, and an edit of anything else is still caught."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from dualform.engine import verification as audit
from dualform.engine.doubt import fold_doubts
from dualform.engine.plain import PlainExecutor
from dualform.experiments.models.transformer import transformer
from dualform.identity.families import optimizer_kinds
from dualform.identity.families.optimizer_replay import OptimizerReplay
from dualform.store.stored_shares import StoredShares
from helpers.small import state

WIDTH = 16
STEPS = 30
LR = 1e-3


class BackwardSum(torch.autograd.Function):
    """A linear layer that adds up the errors of its bias from the last row to the first, as a compiler may."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return inputs @ weight.T + bias

    @staticmethod
    def backward(ctx: Any, *errors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inputs, weight = ctx.saved_tensors
        rows = errors[0].reshape(-1, len(weight))
        summed = rows.new_zeros(len(weight))
        for row in rows.flip(0):
            summed = summed + row
        return errors[0] @ weight, rows.t() @ inputs.reshape(-1, inputs.shape[-1]), summed


class Attention(nn.Module):
    """Self-attention as BERT has it, with a layer for each projection; or as GPT-2 has it, with one for all three."""

    def __init__(self, *, packed: bool = False) -> None:
        super().__init__()
        self.packed = packed
        if packed:
            self.all = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.packed:
            query, key, value = self.all(inputs).split(WIDTH, dim=-1)
        else:
            query, key, value = self.query(inputs), self.key(inputs), self.value(inputs)
        met = functional.scaled_dot_product_attention(query, key, value)
        found: Tensor = self.out(met.mean(dim=1))
        return found


def trained(
    run: Path, make: Callable[[nn.Module], torch.optim.Optimizer], *, packed: bool = False, **options: Any
) -> nn.Module:
    """Record a training of attention, and return the trained model."""
    torch.manual_seed(0)
    model = Attention(packed=packed)
    optimizer = make(model)
    with dualform.record(model, optimizer, run, **options):
        for _ in range(STEPS):
            inputs = torch.randn(8, 6, WIDTH)
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), inputs[:, 0, :4].argmax(dim=1)).backward()
            optimizer.step()
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR)


def edited(run: Path, model: nn.Module, name: str, share: float, units: slice = slice(None)) -> dict[str, Tensor]:
    """Return the model's parameters, some units of one of them off by a share of how far training moved them."""
    found = state(model)
    moved = (found[name] - dualform.open(run)._run.initial[name])[units]
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(moved.shape, generator=generator)
    found[name][units] += share * moved.norm() * noise / noise.norm()
    return found


def failing(check: audit.Verification) -> list[str]:
    return [p.parameter for layer in check.layers for p in layer.parameters if not p.passed]


def test_shares_of_a_key_bias_sum_to_it_by_every_grouping(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first grouping leaves of a gradient that is rounding alone is not what another one leaves."""
    model = trained(run, adamw, keep=dualform.Shares(by=[["row"], ["position"]]))
    memory = dualform.open(run)
    check = memory.verify(model)
    assert check.passed, check
    found = {p.parameter: p for layer in check.layers for p in layer.parameters}
    assert found["key.bias"].relative > 1e-4, "or this shows nothing"
    for name in ("key.bias", "key.weight", "out.weight"):
        assert failing(memory.verify(edited(run, model, name, 1.0 if name == "key.bias" else 1e-3))) == [name]
    shares = StoredShares.shares

    def off(source: StoredShares, parameter: str, by: tuple[str, ...], **of: Any) -> Any:
        kept = shares(source, parameter, by, **of)
        if (parameter, by) == ("key.bias", ("position",)):
            kept.shares[0] += 10 * found["key.bias"].change  # of each element: more than rounding explains
        return kept

    monkeypatch.setattr(StoredShares, "shares", off)
    assert failing(memory.verify(model)) == ["key.bias"]


OPTIMIZERS = [
    kind.optimizer.__name__ for kind in optimizer_kinds().values() if not kind.rounds and not kind.has_coefficients
]


@pytest.mark.mostly_slow(fast=2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_key_bias_passes_whatever_the_order_of_its_sum(run: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Its true gradient is zero; an optimizer divides what rounding leaves of that by its own size."""
    monkeypatch.setattr(functional, "linear", BackwardSum.apply)
    lr = 1.0 if name == "Adadelta" else LR
    model = trained(run, lambda model: getattr(torch.optim, name)(model.parameters(), lr=lr))
    memory = dualform.open(run)
    check = memory.verify(model)
    assert check.passed, check
    found = {p.parameter: p for layer in check.layers for p in layer.parameters}
    assert found["key.bias"].relative > 1e-2, "or this shows nothing"
    others = {name: p.relative for name, p in found.items() if name != "key.bias"}
    assert max(others.values()) < 1e-4, others
    for other in ("query.bias", "key.weight", "out.weight"):
        assert failing(memory.verify(edited(run, model, other, 1e-3))) == [other]
    assert failing(memory.verify(edited(run, model, "key.bias", 1e3))) == ["key.bias"]


@pytest.mark.parametrize("penalty", [0.0, 1e-3, 1e-9])
def test_shares_of_a_transformer_pass_and_a_regulariser_of_its_key_bias_does_not(run: Path, penalty: float) -> None:
    torch.manual_seed(0)
    model = transformer(tokens=11, width=8, heads=2, blocks=2, context=12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    bias = model.get_parameter("blocks.0.attention.k.bias")
    with dualform.record(model, optimizer, run, keep=dualform.Shares(by="source")) as recorder:
        for _ in range(10):
            tokens = torch.randint(11, (4, 12))
            recorder.annotate(source=["a", "b", "a", "c"])
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(tokens[:, :-1])[0].flatten(0, 1), tokens[:, 1:].flatten())
            (loss + penalty * bias.sin().sum()).backward()
            optimizer.step()
    check = dualform.open(run).verify(model)
    assert failing(check) == (["blocks.0.attention.k.bias"] if penalty else []), check
    (keys,) = [layer for layer in check.layers if layer.layer == "blocks.1.attention.k"]
    assert keys.unexplained is not None
    assert keys.unexplained > 1e-3, "rounding is all there is of a key bias, or this shows nothing"


def test_shares_know_of_rounding_what_their_patterns_know(run: Path) -> None:
    """And what rounding did to the key part of a bias hides no edit of other parts."""
    trained(run, adamw, packed=True, keep=[dualform.Shares(by="step"), dualform.Patterns()])
    memory = dualform.open(run)
    kept = memory._run.kept_shares
    assert kept is not None
    found = kept.gradient_spread("all.bias")
    doubts = fold_doubts(memory._run, ["all.bias"], horizon=STEPS)
    expected = PlainExecutor().run(memory._run, [doubts])[0]["all.bias"].spread
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)
    assert kept.gradient_spread("all.weight") is None


def test_rounding_of_a_key_part_hides_no_regulariser_of_the_value_part(run: Path) -> None:
    torch.manual_seed(0)
    model = Attention(packed=True)
    optimizer = adamw(model)
    with dualform.record(model, optimizer, run, keep=dualform.Shares(by="step")):
        for _ in range(STEPS):
            inputs = torch.randn(8, 6, WIDTH)
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), inputs[:, 0, :4].argmax(dim=1)).backward()
            assert model.all.bias.grad is not None
            model.all.bias.grad[2 * WIDTH :] *= 1 + 1e-3
            optimizer.step()
    check = dualform.open(run).verify(model)
    assert failing(check) == ["all.bias"], check


def test_rounding_in_some_elements_hides_no_edit_of_others(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "linear", BackwardSum.apply)
    model = trained(run, adamw, packed=True)
    memory = dualform.open(run)
    check = memory.verify(model)
    assert check.passed, check
    (bias,) = [p for layer in check.layers for p in layer.parameters if p.parameter == "all.bias"]
    assert bias.relative > 1e-4, "the key part is off, or this shows nothing"
    for units in (slice(0, WIDTH), slice(2 * WIDTH, None)):  # the parts of queries and of values
        assert failing(memory.verify(edited(run, model, "all.bias", 1e-3, units))) == ["all.bias"]
    for units in (slice(0, WIDTH), slice(2 * WIDTH, None)):
        assert failing(memory.verify(edited(run, model, "all.weight", 1e-3, units))) == ["all.weight"]


def test_a_key_bias_passes_when_its_patterns_are_stored_as_float16(run: Path) -> None:
    model = trained(run, adamw, dtype="float16")
    memory = dualform.open(run)
    check = memory.verify(model)
    assert check.passed, check
    (bias,) = [p for layer in check.layers for p in layer.parameters if p.parameter == "key.bias"]
    assert bias.relative > 1.0, "or this shows nothing"
    for other in ("query.bias", "key.weight", "out.weight"):
        assert failing(memory.verify(edited(run, model, other, 5e-2))) == [other]


@pytest.mark.parametrize("seed", range(3))
def test_backwards_that_cancel_under_autocast_pass(run: Path, seed: int) -> None:
    """Each backward's gradient is rounded to bfloat16: of a sum that nearly cancels only the rounding is left."""
    torch.manual_seed(seed)
    model = nn.Linear(6, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    with dualform.record(model, optimizer, run):
        for _ in range(8):
            optimizer.zero_grad()
            errors = torch.randn(12, 64)
            back = torch.randn(12, 64)
            back[:, :2] = -errors[:, :2].bfloat16().float()
            back[0, :2] *= 1.01
            for weights in (errors, back):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    outputs = model(torch.randn(12, 6))
                (outputs.float() * weights).sum().backward()
            optimizer.step()
    memory = dualform.open(run)
    check = memory.verify(model)
    assert check.passed, check
    off = (memory.weights()["bias"] - model.bias.detach()).abs()
    assert bool((off > LR / 4).any()), "an element is off by a step, or this shows nothing"
    assert failing(memory.verify(edited(run, model, "bias", 0.1, slice(2, None)))) == ["bias"]
    assert failing(memory.verify(edited(run, model, "weight", 0.1))) == ["weight"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.SGD(model.parameters(), lr=1e-6),
        lambda model: torch.optim.SGD(model.parameters(), lr=1e-7, momentum=0.9, nesterov=True),
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-8),
    ],
    ids=["SGD", "SGD with momentum", "AdamW"],
)
def test_steps_below_the_last_place_of_a_weight_pass(
    run: Path, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    """All such steps are rounded to the same side, most of them to nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = make(model)
    inputs = torch.randn(32, 5)
    labels = inputs[:, :3].argmax(dim=1)
    with dualform.record(model, optimizer, run):
        for _ in range(600):
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    memory = dualform.open(run)
    check = memory.verify(model)
    assert check.passed, check
    assert max(p.relative for layer in check.layers for p in layer.parameters) > 1e-2, "or this shows nothing"
    wrong = state(model)
    wrong["0.weight"] *= 1.001
    assert failing(memory.verify(wrong)) == ["0.weight"]


def test_drift_counts_only_as_far_as_rounding_goes_and_only_its_way(run: Path) -> None:
    model = trained(run, adamw)
    memory = dualform.open(run)
    name = "query.weight"
    doubt = PlainExecutor().run(memory._run, [fold_doubts(memory._run, [name], horizon=STEPS)])[0][name]
    live = model.get_parameter(name).detach().double()
    assert float(doubt.largest.max()) < 1e-5
    torch.testing.assert_close(doubt.replayed, live, rtol=1e-6, atol=1e-9)
    far = live - 1.0
    torch.testing.assert_close(doubt.drift(far), doubt.largest)
    there = far + doubt.largest / 2
    assert float(doubt.apart(far, there).max()) < 1e-12
    assert float(doubt.apart(far, far - doubt.largest).min()) > 0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_noise_moves_no_element_further_than_the_doubt_about_it(name: str) -> None:
    """Two trainings on nothing but noise, and one number for how far apart they may come."""
    kind = optimizer_kinds()[getattr(torch.optim, name)]
    elements = 10_000
    parameters = [torch.zeros(elements, requires_grad=True) for _ in range(2)]
    optimizers = [getattr(torch.optim, name)([parameter], lr=LR) for parameter in parameters]
    spread = kind.spread((elements,))
    assert spread is not None
    replay = OptimizerReplay(kind, torch.zeros(elements), {})
    settings = kind.decode(kind.encode(optimizers[0].param_groups[0], {}))
    generator = torch.Generator().manual_seed(0)
    for step in range(100):
        noises = [1e-3 * torch.randn(elements, generator=generator) for _ in parameters]
        for parameter, optimizer, noise in zip(parameters, optimizers, noises, strict=True):
            parameter.grad = noise
            optimizer.step()
        spread.step(replay.step(settings, noises[0].clone()), settings, torch.ones(elements))
        if step in (0, 1, 4, 19, 99):
            apart = (parameters[0] - parameters[1]).detach().abs().double()
            assert bool((apart <= audit.MAX_DOUBTS * spread.size).all()), step
            if name not in ("Adadelta", "RAdam"):  # whose first steps are far below the learning rate
                assert float(spread.size.max()) < 50 * float(apart.square().mean().sqrt()), "not all is excused"
