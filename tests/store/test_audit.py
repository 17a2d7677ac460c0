"""`verify`: what it passes, what it fails, and what it says."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from dualform.engine.coverage import Coverage
from dualform.engine.verification import LayerCheck, ParameterCheck, Verification
from dualform.errors import QueryError, SelectionError
from helpers.small import batch, network, recorded, sgd, state, train


@pytest.mark.parametrize("lr", [1e-1, 1e-3, 1e-6])
def test_correct_runs_pass_at_any_learning_rate_and_edited_ones_fail(run: Path, lr: float) -> None:
    model = network()
    optimizer = sgd(model, lr=lr, weight_decay=0.0)
    with dualform.record(model, optimizer, run) as recorder:
        train(model, optimizer, range(50), recorder)
    memory = dualform.open(run)
    assert memory.verify(model).passed
    for name in state(model):
        edited = state(model)
        edited[name] *= 1.001
        check = memory.verify(edited)
        assert not check.passed, name
        wrong = [p.parameter for layer in check.layers for p in layer.parameters if not p.passed]
        assert wrong == [name]
        assert not check


def test_every_step_verifies_against_its_checkpoint_and_no_other(run: Path) -> None:
    model = network()
    optimizer = sgd(model)
    states = [state(model)]
    with dualform.record(model, optimizer, run, shard_bytes=1000) as recorder:
        states += train(model, optimizer, range(8), recorder)
    memory = dualform.open(run)
    for step, expected in enumerate(states):
        assert memory.at(step=step).verify(expected).passed
        assert not memory.at(step=step).verify(states[(step + 1) % 9]).passed


def test_a_float16_run_passes_although_its_contributions_cancel(run: Path) -> None:
    """One step down, one step up: what float16 rounds off each step is large beside the change that is left."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    with dualform.record(model, optimizer, run, dtype="float16"):
        for step in range(100):
            optimizer.param_groups[0]["maximize"] = bool(step % 2)
            inputs, labels = batch(step // 2)
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs * (1 + 0.001 * (step % 2))), labels).backward()
            optimizer.step()
    memory = dualform.open(run)
    check = memory.verify(model)
    assert check.passed, check
    assert max(p.relative for layer in check.layers for p in layer.parameters) > 2e-3, "or this shows nothing"
    for name in state(model):
        edited = state(model)
        edited[name] *= 1.001
        assert not memory.verify(edited).passed


def test_a_model_of_another_shape_or_without_the_parameters_is_named(run: Path) -> None:
    model = recorded(run, 2)
    memory = dualform.open(run)
    other = state(model) | {"0.bias": torch.zeros(7)}
    with pytest.raises(QueryError, match=r"'0.bias' is \(4,\) in the memory, but \(7,\) in this model"):
        memory.verify(other)
    del other["0.bias"]
    with pytest.raises(QueryError, match=r"lacks the recorded parameters '0.bias'"):
        memory.verify(other)


def test_a_model_of_another_dtype_is_compared_as_it_is(run: Path) -> None:
    model = recorded(run, 5)
    memory = dualform.open(run)
    assert memory.verify(network().double().requires_grad_(False)).passed is False
    assert memory.verify({name: tensor.double() for name, tensor in state(model).items()}).passed
    assert not memory.verify({name: tensor.bfloat16() for name, tensor in state(model).items()}).passed


def test_a_masked_view_cannot_be_verified(run: Path) -> None:
    model = recorded(run, 2)
    with pytest.raises(SelectionError, match="Verify the whole memory"):
        dualform.open(run).where(label=1).verify(model)


def test_without_a_model_only_the_ends_can_be_verified(run: Path) -> None:
    recorded(run, 4)
    memory = dualform.open(run)
    assert memory.verify().passed
    assert memory.at(step=0).verify().passed
    with pytest.raises(QueryError, match="Nothing to compare with after 2 steps"):
        memory.at(step=2).verify()


def test_the_report_says_what_was_checked(run: Path) -> None:
    model = recorded(run, 7)
    check = dualform.open(run).verify(model)
    assert (check.step, check.files) == (7, 14)
    text = repr(check)
    assert text.splitlines()[0].split() == ["layer", "patterns", "stored", "relative", "error", "bound", "result"]
    assert text.splitlines()[-1] == "after 7 steps, 14 files: passed"
    assert [layer.patterns for layer in check.layers] == [42, 42]
    assert [layer.bytes for layer in check.layers] == [42 * 4 * 9, 42 * 4 * 7]


class OwnUpsampling(nn.ConvTranspose2d):
    """A layer with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class Generator(nn.Module):
    """A network of which only a normalisation can be recorded: the rest are layers with a forward of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = OwnUpsampling(4, 16, 4, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.out = OwnUpsampling(16, 1, 4, bias=False)

    def forward(self, noise: Tensor) -> Tensor:
        found: Tensor = self.out(self.norm(self.up(noise)).relu())
        return found


def generate(run: Path, **options: Any) -> Generator:
    """Record three steps of a generator; of 1,312 trained elements 32 can be recorded."""
    torch.manual_seed(0)
    model = Generator()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with pytest.warns(UserWarning, match="not recorded"):
        recorder = dualform.record(model, optimizer, run, **options)
    with recorder:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 4, 1, 1)).square().mean().backward()
            optimizer.step()
    return model


def test_what_is_not_covered_is_named_with_its_share(run: Path) -> None:
    model = generate(run)
    check = dualform.open(run).verify(model)
    assert check.passed
    assert dict(check.uncovered) == {"up.weight": 1024, "out.weight": 256}
    assert check.uncovered_share == pytest.approx(1280 / 1312)
    lines = repr(check).splitlines()
    assert lines[-2] == "not recorded: 2 parameters, 97.6 % of the trained elements: up.weight, out.weight"
    assert lines[-1].endswith("passed for what is recorded (2.4 % of the trained elements)")


def test_a_run_that_records_nothing_that_was_trained_does_not_pass() -> None:
    """As of a run whose recorded layers are frozen, and whose trained parameters no layer covers."""
    frozen = LayerCheck("0", 12, 400, (ParameterCheck("0.weight", error=0.0, change=0.0, bound=1e-6),))
    check = Verification(2, 6, (frozen,), Coverage({"scale": 2}, 0))
    assert "passed" not in repr(check).splitlines()[-1]
    assert "nothing to compare: no trained parameter is recorded" in check.verdict


def test_keys_only_is_no_plain_pass(run: Path) -> None:
    recorded(run, 2, layers={"*": "keys"})
    check = dualform.open(run).verify()
    assert check.verdict == "files whole; nothing to compare: keys only"


def test_a_run_without_steps_is_no_plain_pass(run: Path) -> None:
    recorded(run, 0)
    check = dualform.open(run).verify()
    assert check.verdict == "files whole; nothing to rebuild: no steps"


def test_the_bound_stands_beside_the_error(run: Path) -> None:
    model = recorded(run, 7)
    check = dualform.open(run).verify(model)
    for line, layer in zip(repr(check).splitlines()[1:], check.layers, strict=False):
        assert layer.error is not None
        assert layer.bound is not None
        assert layer.error <= layer.bound < 1e-4
        assert line.split()[-3:] == [f"{layer.error:.1e}", f"{layer.bound:.1e}", "passed"]


def test_a_failure_names_the_parameter_and_the_step_that_the_weights_are_of(run: Path) -> None:
    model = network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run, shard_bytes=1000) as recorder:
        states = [state(model), *train(model, optimizer, range(8), recorder)]
    memory = dualform.open(run)
    check = memory.verify(states[5])
    assert not check.passed
    assert "'0.weight' is off by" in repr(check)
    assert "after step 5" in check.hint
    assert "--at 5" in repr(check)
    assert "before the first step" in memory.verify(states[0]).hint
    assert "no recorded step" in memory.verify(network(seed=9)).hint
    assert memory.verify(states[8]).hint == ""
