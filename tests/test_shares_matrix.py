"""Every layer × every optimizer: shares that were folded while training equal those made of the patterns afterwards."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import dualform
from dualform.recording.layers import sums_in_own_order
from dualform.store.memory_blobs import MemoryBlobs
from dualform.store.reader import Run
from test_exactness_matrix import LAYERS, OPTIMIZERS, B, D, L

STEPS = 7  # RAdam leaves its first phase after the fifth
WITHIN = {torch.float32: 1e-5, torch.float64: 1e-11}
EMPTY_GRADIENT = "in_proj_bias"  # its part for keys has the gradient zero, and rounding is all there is


def inputs(step: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(B, L, D, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype)


def fit(
    blobs: MemoryBlobs,
    layer: str,
    optimizers: Callable[[nn.Module], Sequence[Optimizer]],
    dtype: torch.dtype,
    keep: Sequence[dualform.Shares | dualform.Patterns],
) -> nn.Module:
    torch.manual_seed(0)
    model = LAYERS[layer]().to(dtype)
    chosen = optimizers(model)
    with dualform.record(model, chosen, blobs, keep=keep) as recorder:
        for step in range(STEPS):
            recorder.annotate(label=torch.arange(B) % 3 if step % 2 else torch.tensor([0, 0, 1, 1]))
            for optimizer in chosen:
                optimizer.zero_grad()
            output = model(inputs(step, dtype))
            (output * torch.linspace(-1, 2, output.numel()).to(output).reshape(output.shape)).sin().mean().backward()
            for optimizer in chosen:
                optimizer.step()
    return model


def without_the_worst(apart: Tensor) -> float:
    """Return the norm of differences but for 2 % of the elements, at least one.

    Where the gradient of an element nearly vanishes, Adam makes of its rounding as much as of a gradient.
    """
    kept = apart.flatten().sort().values
    return float(kept[: len(kept) - max(1, len(kept) // 50)].norm())


CASES = [
    (layer, list(OPTIMIZERS)[(place + shift) % len(OPTIMIZERS)])
    for shift in range(len(OPTIMIZERS))
    for place, layer in enumerate(LAYERS)
]
"""All pairs; the first ones have each layer once and the optimizers in turn."""


@pytest.mark.mostly_slow(fast=10)
@pytest.mark.parametrize(("layer", "optimizer"), CASES)
def test_live_shares_are_those_of_the_patterns(layer: str, optimizer: str) -> None:
    for dtype, within in WITHIN.items():
        blobs = MemoryBlobs()
        model = fit(blobs, layer, OPTIMIZERS[optimizer], dtype, [dualform.Shares(by="label"), dualform.Patterns()])
        run = Run(blobs)
        live, patterns = run.kept_shares, dualform.open(blobs).share_source("label")
        assert live is not None
        if optimizer == "Muon":  # which raises small directions of a gradient, and their rounding, up to 485-fold
            within *= 10
        own_order = sums_in_own_order(layer.partition(",")[0])
        for name, parameter in model.named_parameters():
            found, expected = live.shares(name, ("label",)), patterns.shares(name, ("label",))
            assert found.labels == expected.labels
            weight = parameter.detach().double()
            scale = float((weight - run.initial[name].double()).norm()) or 1.0
            if EMPTY_GRADIENT not in name and not (own_order and name.startswith("layer.")):
                apart = (found.shares.double() - expected.shares.double()).abs()
                assert without_the_worst(apart) <= within * scale, name
                assert without_the_worst(found.unexplained.double().abs()) <= within * scale, name
                assert float(apart.norm()) <= 100 * within * scale, name
            whole = found.start + found.shares.double().sum(dim=0) + found.unexplained + found.rounding
            assert float((whole - weight).norm()) <= 0.1 * within * float(weight.norm()), name


@pytest.mark.mostly_slow(fast=3)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_is_equal_to_the_bit(optimizer: str) -> None:
    made: list[dict[str, Tensor]] = []
    for keep in ([dualform.Patterns()], [dualform.Shares(by="label")]):
        model = fit(MemoryBlobs(), "Embedding, tied to the output layer", OPTIMIZERS[optimizer], torch.float32, keep)
        made.append(model.state_dict())
    assert all(torch.equal(tensor, made[1][name]) for name, tensor in made[0].items())


@pytest.mark.mostly_slow(fast=4)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_planted_regulariser_is_unexplained_and_in_no_group(optimizer: str) -> None:
    """The groups' gradients are fed to a second run as they are, with the regulariser's gradient apart."""
    strength, by = 3e-2, ("label",)
    found = {}
    for planted in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(D, 3).double()
        chosen = OPTIMIZERS[optimizer](model)
        blobs = MemoryBlobs()
        with dualform.record(model, chosen, blobs, keep=dualform.Shares(by="label")) as recorder:
            for step in range(STEPS):
                recorder.annotate(label=torch.arange(B) % 3)
                for one in chosen:
                    one.zero_grad()
                rows = inputs(step, torch.float64)[:, 0]
                # The loss is linear in the output, so that the patterns do not depend on the weights.
                loss = (model(rows) * torch.linspace(-1, 2, 3 * B).double().reshape(B, 3)).sum()
                if planted:
                    loss = loss + strength * model.weight.sum()
                loss.backward()
                for one in chosen:
                    one.step()
        kept = Run(blobs).kept_shares
        assert kept is not None
        found[planted] = kept.shares("weight", by)
    without, with_it = found[False], found[True]
    scale = float(without.shares.norm())
    assert float(without.unexplained.norm()) <= 1e-11 * scale
    assert float(with_it.unexplained.norm()) > 1e-4 * scale
    if optimizer == "SGD":  # whose maps do not depend on gradients: the groups' shares are the same, to rounding
        torch.testing.assert_close(with_it.shares, without.shares, rtol=1e-11, atol=1e-13)
        lr, momentum, decay = 0.1, 0.9, 1e-3
        weight = buffer = 0.0
        for step in range(STEPS):
            moved = strength + decay * weight
            buffer = moved if not step else momentum * buffer + moved
            weight -= lr * (moved + momentum * buffer)
        torch.testing.assert_close(
            with_it.unexplained, torch.full((3, D), weight, dtype=torch.float64), rtol=1e-10, atol=1e-12
        )
