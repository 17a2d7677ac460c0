"""Layers that torch does not bring: RMSNorms of other packages, and a layer of one's own."""

import doctest
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dualform
from dualform.errors import RefusedError
from dualform.identity.parameter_use import ParameterUse
from dualform.recording.layers import LayerKind, find_kind, layer_kind


class OtherRMSNorm(nn.Module):
    """As language models write it: computed in float32, the epsilon under a name of its own."""

    def __init__(self, width: int, epsilon: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden.dtype)


class OtherLayerNorm(OtherRMSNorm):
    """As T5 names it, though it takes no mean away."""


class ShiftedRMSNorm(OtherRMSNorm):
    """Multiplies by one plus the weight."""

    def forward(self, hidden: Tensor) -> Tensor:
        return (1 + self.weight) / self.weight.clamp(min=1e-9) * super().forward(hidden)


class FailingRMSNorm(OtherRMSNorm):
    """Cannot be tried."""

    def forward(self, hidden: Tensor) -> Tensor:
        raise RuntimeError("only on a GPU")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, run: Path) -> dualform.Memory:
    torch.manual_seed(0)
    with dualform.record(model, optimizer, run, strict=True) as recorder:
        for step in range(12):
            recorder.annotate(sample=torch.arange(6) + 6 * step)
            optimizer.zero_grad()
            model(torch.randn(6, 4, 8)).sin().mean().backward()
            optimizer.step()
    return dualform.open(run)


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_an_rms_norm_of_another_package_is_recorded(run: Path, name: str) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), OtherRMSNorm(8), nn.Linear(8, 3))
    memory = train(model, getattr(torch.optim, name)(model.parameters(), lr=0.05), run)
    assert memory.layers["1"].kind == "RMSNorm"
    assert memory.verify(model).passed
    assert not memory.coverage.uncovered
    inputs = torch.randn(2, 4, 8)
    output = memory.attend(model, inputs)["1"].output()
    torch.testing.assert_close(output, model[:2](inputs).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("other", [ShiftedRMSNorm, FailingRMSNorm])
def test_a_module_that_computes_something_else_is_left_alone(other: type[OtherRMSNorm]) -> None:
    assert find_kind(OtherRMSNorm(8)) is not None
    assert find_kind(OtherLayerNorm(8)) is not None
    assert find_kind(other(8)) is None


class GatedRMSNorm(OtherRMSNorm):
    """Takes a gate too, without which it is an RMSNorm."""

    def forward(self, hidden: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(hidden if gate is None else hidden * gate.sigmoid())


def test_a_norm_of_two_arguments_or_of_one_factor_is_left_alone() -> None:
    assert find_kind(GatedRMSNorm(8)) is None
    assert find_kind(OtherRMSNorm(1)) is None, "its one factor would fit inputs of any width"


def test_the_trial_calls_no_hooks() -> None:
    norm, seen = OtherRMSNorm(8), []
    norm.register_forward_hook(lambda module, args, output: seen.append(args))
    assert find_kind(norm) is not None
    assert not seen


def test_the_trial_leaves_the_module_as_it_was() -> None:
    norm = OtherRMSNorm(8).double().train()
    before = norm.weight.detach().clone()
    assert find_kind(norm) is not None
    assert torch.equal(norm.weight, before)
    assert norm.training
    assert norm.weight.grad is None


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_layer_of_ones_own(run: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The example is the one in the documentation of `register_layer`, word for word."""
    monkeypatch.setattr(layer_kind, "_KINDS", dict(layer_kind._KINDS))
    example = dict(vars(layer_kind))
    exec(doctest.script_from_examples(layer_kind.register_layer.__doc__ or ""), example)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), example["Scaled"](8), nn.Linear(8, 3))
    memory = train(model, getattr(torch.optim, name)(model.parameters(), lr=0.05), run)
    assert memory.layers["1"].kind == "Scaled"
    assert memory.verify(model).passed
    inputs = torch.randn(2, 4, 8)
    layer = memory.attend(model, inputs)["1"]
    torch.testing.assert_close(layer.output(), model[:2](inputs).detach(), rtol=1e-4, atol=1e-5)
    totals = layer.totals("sample", of="contribution").values.sum(1) + layer.start()
    torch.testing.assert_close(totals.reshape(2, 4, 8), layer.output(), rtol=1e-4, atol=1e-5)


class Twice(nn.Module):
    """Uses one parameter in two ways."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(width))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.factor * inputs + self.factor


class TwiceKind(LayerKind):
    name = "Twice"

    def uses(self, module: nn.Module) -> tuple[ParameterUse, ...]:
        return ParameterUse("factor", "factor", "scale"), ParameterUse("shift", "factor", "bias")

    def widths(self, module: nn.Module) -> tuple[int, int]:
        return 8, 8


def test_a_layer_that_uses_a_parameter_twice_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each use's patterns would be missing from what the other adds to the output."""
    monkeypatch.setattr(layer_kind, "_KINDS", dict(layer_kind._KINDS))
    dualform.register_layer(Twice, TwiceKind)
    model = nn.Sequential(Twice(8), nn.Linear(8, 3))
    with pytest.raises(RefusedError, match=r"Layer '0' uses its parameter '0\.factor' twice in one call"):
        dualform.record(model, torch.optim.SGD(model.parameters(), lr=0.05), run)
