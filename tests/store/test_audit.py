"""`verify`: what it passes, what it fails, and what it says."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional

import dualform
from dualform.errors import QueryError, SelectionError
from small import batch, network, recorded, sgd, state, train


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
    assert text.splitlines()[0].split() == ["layer", "patterns", "stored", "relative", "error", "result"]
    assert text.splitlines()[-1] == "after 7 steps, 14 files: passed"
    assert [layer.patterns for layer in check.layers] == [42, 42]
    assert [layer.bytes for layer in check.layers] == [42 * 4 * 9, 42 * 4 * 7]
