"""The calls of a step: keys that are not finite, in steps whose gradients were zeroed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import dualform
from helpers.loops import assert_exact, batches, counts, loss_of, mlp, sgd


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.01)


@pytest.mark.parametrize("make", [sgd, adam])
def test_keys_of_a_gradient_that_was_zeroed_do_not_poison_the_sums(
    run: Path, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    """A row that the loss leaves out has errors of 0; times NaN that is NaN in the gradients of the weights alone."""
    model = mlp()
    optimizer = make(model)
    with dualform.record(model, optimizer, run):
        for step, x in enumerate(batches(6)):
            x = x.clone()
            if step == 3:
                x[1] = float("nan")
            optimizer.zero_grad()
            loss_of(model(x)[[0, 2, 3]]).backward()
            if step == 3:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad.nan_to_num_()
            optimizer.step()
    memory = dualform.open(run)
    assert counts(memory) == {"0": 24, "2": 24}
    assert_exact(memory, model)
    spotlight = memory.attend(model, batches(1)[0])
    for layer in ("0", "2"):
        assert spotlight[layer].totals(by="step").values.isfinite().all()
        assert spotlight[layer].totals(by="step", of="contribution").values.isfinite().all()
        torch.testing.assert_close(spotlight[layer].output(), _output(model, layer), rtol=1e-4, atol=1e-5)


def _output(model: nn.Module, layer: str) -> torch.Tensor:
    with torch.no_grad():
        x = batches(1)[0]
        return model[:1](x) if layer == "0" else model(x)  # type: ignore[index]


def test_a_step_whose_gradients_were_all_zeroed_has_no_patterns(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run):
        for step, x in enumerate(batches(6)):
            optimizer.zero_grad()
            loss_of(model(x * float("nan") if step == 3 else x)).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.nan_to_num_()
            optimizer.step()
    memory = dualform.open(run)
    assert counts(memory) == {"0": 20, "2": 20}
    assert_exact(memory, model)


def test_keys_of_a_frozen_weight_that_are_not_finite(run: Path) -> None:
    """Where only biases are trained, no gradient holds the keys."""
    model = mlp()
    for layer in (model[0], model[2]):
        layer.weight.requires_grad_(False)
    optimizer = adam(model)
    with dualform.record(model, optimizer, run):
        for step, x in enumerate(batches(4)):
            x = x.clone()
            if step == 2:
                x[0] = float("nan")
            optimizer.zero_grad()
            loss_of(model(x)[1:]).backward()
            optimizer.step()
    memory = dualform.open(run)
    assert memory.verify(model).passed
    assert memory.attend(model, batches(1)[0])["0"].totals(by="step").values.isfinite().all()
