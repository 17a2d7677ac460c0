"""The order in which a bias's errors were added up: whatever torch chose, the replay finds the same bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dualform
from dualform.engine.parameter_steps import ParameterSteps
from dualform.engine.shares import replayed_parameters
from dualform.engine.stored_calls import StepReader
from dualform.recording.layouts import describe_layout, laid_out

UNITS = 33


class OneProduct(torch.autograd.Function):
    """A linear layer that returns no view, and adds up the rows of its error: as `F.linear` does since torch 2.15."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return inputs @ weight.T + bias

    @staticmethod
    def backward(ctx: Any, *errors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inputs, weight = ctx.saved_tensors
        rows = errors[0].reshape(-1, len(weight))
        return errors[0] @ weight, rows.t() @ inputs.reshape(-1, inputs.shape[-1]), rows.sum(0)


class LeadingAxes(torch.autograd.Function):
    """A linear layer that returns no view, and adds up its error over all leading axes at once, as it lies."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return inputs @ weight.T + bias

    @staticmethod
    def backward(ctx: Any, *errors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inputs, weight = ctx.saved_tensors
        rows = errors[0].reshape(-1, len(weight))
        leading = tuple(range(errors[0].dim() - 1))
        summed = errors[0].sum(leading) if leading else errors[0]
        return errors[0] @ weight, rows.t() @ inputs.reshape(-1, inputs.shape[-1]), summed


class Bring(torch.autograd.Function):
    """The identity, whose backward brings an error of a given layout."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, error: Tensor) -> Tensor:
        ctx.error = error
        return outputs.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.error, None


def error_of(shape: tuple[int, ...], layout: str) -> Tensor:
    """Return random errors of a shape that lie in memory in some other way than row by row."""
    axes = range(len(shape))
    if layout == "transposed" and len(shape) > 1:
        return torch.randn(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
    if layout == "reversed":
        return torch.randn(*shape[::-1]).permute(*reversed(axes))
    if layout == "one row for all" and len(shape) > 1:
        return torch.randn(1, *shape[1:]).expand(shape)
    if layout == "one number for a row":
        return torch.randn(*shape[:-1], 1).expand(shape)
    if layout == "every second unit":
        return torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]
    if layout == "half of the units":
        return torch.randn(*shape[:-1], 2 * shape[-1])[..., : shape[-1]]
    return torch.randn(shape)


LAYOUTS = [
    "row by row",
    "transposed",
    "reversed",
    "one row for all",
    "one number for a row",
    "every second unit",
    "half of the units",
]


@pytest.mark.mostly_slow(fast=33)
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("leading", [(), (37,), (8, 12), (2, 3, 11)])
@pytest.mark.parametrize("linear", [None, OneProduct, LeadingAxes])
def test_gradients_are_replayed_to_the_bit_in_every_layout(
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    linear: type[torch.autograd.Function] | None,
    leading: tuple[int, ...],
    layout: str,
    calls: int,
) -> None:
    if linear is not None:
        monkeypatch.setattr(nn.functional, "linear", linear.apply)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, UNITS))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    expected = []
    with dualform.record(model, optimizer, run):
        for _ in range(3):
            optimizer.zero_grad()
            outputs = [
                Bring.apply(model(torch.randn(*leading, 6)), error_of((*leading, UNITS), layout)) for _ in range(calls)
            ]
            sum(output.sum() for output in outputs).backward()
            expected.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
            optimizer.step()
    memory = dualform.open(run)
    source = memory._run
    steps = {name: ParameterSteps(source, name) for name in replayed_parameters(source, ["0"])}
    reader = StepReader(source, steps)
    found = []
    for step in range(3):
        taken = {name: one.take(step, reader.calls(step)) for name, one in steps.items()}
        found.append({name: one.gradient for name, one in taken.items() if one is not None})
    for rebuilt, gradients in zip(found, expected, strict=True):
        for name, gradient in gradients.items():
            assert torch.equal(rebuilt[name], gradient), name
    assert memory.verify(model).passed


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_a_described_layout_is_laid_out_again(layout: str) -> None:
    error = error_of((8, 12, UNITS), layout)
    text = describe_layout(error)
    assert text is not None
    again = laid_out(error.reshape(-1, UNITS), text)
    assert again.stride() == error.stride()
    torch.testing.assert_close(again, error, rtol=0, atol=0)


def test_rows_that_lie_one_after_the_other_need_no_layout() -> None:
    assert describe_layout(torch.zeros(3, 4)) is None
    assert describe_layout(torch.zeros(8)[::2]) is None, "one row is no sum"
