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
from test_exactness_matrix import CASES, LAYERS, OPTIMIZERS, B, D, L

STEPS = 7  # RAdam leaves its first phase after the fifth
WITHIN = {torch.float32: 1e-5, torch.float64: 1e-12}
"""How far shares may be apart, over the parameter's change, without the factors of `tolerance`."""
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


def tolerance(optimizer: str, dtype: torch.dtype, *, own_order: bool) -> float:
    """Return how far all elements of live shares may be from those of the patterns, over the parameter's change.

    Differences are rounding, and in float64 nearly nothing amplifies it. Two things do in both dtypes:

    - Muon raises small directions of a gradient, and their rounding, up to 485-fold.
    - Some layers add up their weight gradient in an order of their own (`sums_in_own_order`). The patterns, summed in
      another order, drive a replay of the optimizer whose second moments differ by rounding from the live ones, and a
      step that divides by the size of a gradient amplifies the difference. SGD divides by nothing.

    In float32 an element whose gradient nearly vanishes is known to few digits, and all optimizers but SGD make as much
    of its rounding as of a gradient; `without_the_worst` leaves such elements out.
    """
    found = WITHIN[dtype] * (10 if optimizer == "Muon" else 1)
    if optimizer == "SGD":
        return found
    if dtype == torch.float32:
        return 100 * found
    return 10 * found if own_order else found


def without_the_worst(apart: Tensor) -> float:
    """Return the norm of differences but for 2 % of the elements, at least one."""
    kept = apart.abs().flatten().sort().values
    return float(kept[: len(kept) - max(1, len(kept) // 50)].norm())


def compared(name: str, differences: Tensor) -> Tensor:
    """Return the differences of a parameter's elements that mean anything: all but those of an attention's key bias.

    Its true gradient is zero, so that rounding is all that there is of it, and its shares are made of rounding.
    """
    if EMPTY_GRADIENT not in name:
        return differences
    queries, _, values = differences.chunk(3, dim=-1)
    return torch.cat([queries, values], dim=-1)


@pytest.mark.mostly_slow(fast=10)
@pytest.mark.parametrize(("layer", "optimizer", "dtype"), CASES, ids=str)
def test_live_shares_are_those_of_the_patterns(layer: str, optimizer: str, dtype: torch.dtype) -> None:
    blobs = MemoryBlobs()
    model = fit(blobs, layer, OPTIMIZERS[optimizer], dtype, [dualform.Shares(by="label"), dualform.Patterns()])
    run = Run(blobs)
    live, patterns = run.kept_shares, dualform.open(blobs).share_source("label")
    assert live is not None
    in_own_order = sums_in_own_order(layer.partition(",")[0])
    for name, parameter in model.named_parameters():
        found, expected = live.shares(name, ("label",)), patterns.shares(name, ("label",))
        assert found.labels == expected.labels
        weight = parameter.detach().double()
        scale = float((weight - run.initial[name].double()).norm()) or 1.0
        own_order = in_own_order and name.startswith("layer.")
        apart = compared(name, found.shares.double() - expected.shares.double())
        unexplained = compared(name, found.unexplained.double())
        for difference in (apart, unexplained):
            assert float(difference.norm()) <= tolerance(optimizer, dtype, own_order=own_order) * scale, name
            if not own_order:
                few = WITHIN[dtype] * (10 if optimizer == "Muon" else 1)
                assert without_the_worst(difference) <= few * scale, name
        whole = found.start + found.shares.double().sum(dim=0) + found.unexplained + found.rounding
        assert float((whole - weight).norm()) <= 0.1 * WITHIN[dtype] * float(weight.norm()), name


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
