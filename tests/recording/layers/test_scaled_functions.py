"""Small modules that scale a function of their input, such as norms of a project's own: recognised, and exact."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from dualform.recording.layers import find_kind
from dualform.recording.layers.scaled_functions import ScaledFunction


class Scaling(nn.Module):
    """A module with a weight and perhaps a bias, and a function of the input and of both."""

    def __init__(self, function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        for name, shape in zip(("weight", "bias"), shapes, strict=False):
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.parameters(recurse=False))


class Float32LayerNorm(nn.LayerNorm):
    """As CLIP has it: a subclass with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.float()).to(input.dtype)


def annotated(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return a * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + b


def channels_first(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    centred = x - x.mean(1, keepdim=True)
    normal = centred * torch.rsqrt(centred.pow(2).mean(1, keepdim=True) + 1e-6)
    return a[:, None, None] * normal + b[:, None, None]


RECOGNISED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {  # a module, and the shape of an input
    "layer norm without a bias": (lambda: Scaling(lambda x, a: functional.layer_norm(x, (6,), a), (6,)), (2, 3, 6)),
    "layer norm with a bias": (
        lambda: Scaling(lambda x, a, b: functional.layer_norm(x, (6,), a, b), (6,), (6,)),
        (2, 3, 6),
    ),
    "layer norm that computes in float32": (lambda: Float32LayerNorm(6), (2, 6)),
    "layer norm with the unbiased deviation": (lambda: Scaling(annotated, (6,), (6,)), (5, 6)),
    "layer norm of channels": (lambda: Scaling(channels_first, (6,), (6,)), (2, 6, 3, 4)),
    "epsilon behind the root": (
        lambda: Scaling(lambda x, a: a * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-3), (6,)),
        (2, 6),
    ),
    "bounded input": (lambda: Scaling(lambda x, a: x.clamp(-50, 50) * a, (6,)), (2, 6)),
    "activation": (lambda: Scaling(lambda x, a, b: b + a * x.tanh(), (6,), (6,)), (2, 6)),
}


@pytest.mark.parametrize("name", RECOGNISED)
def test_the_recognised_module_is_linear_in_its_parameters(name: str) -> None:
    make, shape = RECOGNISED[name]
    torch.manual_seed(0)
    module = make()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    kind = find_kind(module)
    assert isinstance(kind, ScaledFunction)
    inputs = torch.randn(shape)
    keys = kind.keys(module, inputs)
    parts = [
        use.parameter_map.apply(module.get_parameter(use.parameter), keys.flatten(0, -2)) for use in kind.uses(module)
    ]
    live = kind.values(module, inputs, module(inputs))
    torch.testing.assert_close(torch.stack(parts).sum(0).reshape(live.shape), live, rtol=1e-4, atol=1e-5)
    assert kind.widths(module) == (6, 6)


class WithBuffer(Scaling):
    """Counts its calls, as a norm over batches keeps running statistics."""

    def __init__(self) -> None:
        super().__init__(lambda x, a: a * x.tanh(), (6,))
        self.register_buffer("calls", torch.zeros(()))


class DroppingInTraining(Scaling):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(super().forward(x), 0.1, training=self.training)


LEFT_ALONE: dict[str, Callable[[], nn.Module]] = {
    "one plus the weight": lambda: Scaling(lambda x, a: (1 + a) * x.tanh(), (6,)),
    "weight inside of the function": lambda: Scaling(lambda x, a: (a * x).tanh(), (6,)),
    "bias inside of the function": lambda: Scaling(lambda x, a, b: a * (x + b).tanh(), (6,), (6,)),
    "weight squared": lambda: Scaling(lambda x, a: a * a * x.tanh(), (6,)),
    "in place": lambda: Scaling(lambda x, a: x.tanh_().mul_(a), (6,)),
    "noise": lambda: Scaling(lambda x, a: a * (x + torch.randn_like(x)), (6,)),
    "dropout": lambda: DroppingInTraining(lambda x, a: a * x.tanh(), (6,)),
    "buffers": WithBuffer,
    "another output": lambda: Scaling(lambda x, a: (a * x.tanh()).sum(-1), (6,)),
    "a table": lambda: Scaling(lambda x, a: a * x.tanh(), (5, 6)),
    "one number, which would fit any width": lambda: Scaling(lambda x, a: a * x.tanh(), (1,)),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_any_other_module_is_left_alone(name: str) -> None:
    assert find_kind(LEFT_ALONE[name]()) is None


def test_the_trial_leaves_module_and_generators_as_they_were() -> None:
    module = RECOGNISED["layer norm with a bias"][0]().double().train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    kind = find_kind(module)
    assert torch.equal(torch.rand(3), expected)
    assert kind is not None
    assert kind.keys(module, torch.randn(2, 6, dtype=torch.float64)).dtype == torch.float64
    assert module.training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("layers", ["keys", "keys+values"])
def test_a_function_that_changes_in_mid_training_is_followed(run: Path, layers: Literal["keys", "keys+values"]) -> None:
    """Keys come from a copy of the module; with keys alone no gradient is compared that would show an old one."""
    torch.manual_seed(0)
    norm = Scaling(lambda x, a: a * x.tanh(), (6,))
    model = nn.Sequential(nn.Linear(6, 6), norm, nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    with dualform.record(model, optimizer, run, layers={"1": layers, "*": "keys+values"}):
        for step in range(4):
            if step == 2:
                norm.function = lambda x, a: a * x.sin()
            inputs = torch.randn(4, 6)
            hidden = model[0](inputs).detach()
            expected.append(hidden.tanh() if step < 2 else hidden.sin())
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    memory = dualform.open(run)
    scores = memory.attend(queries={"1": torch.eye(6)})["1"].attention()
    torch.testing.assert_close(scores.T, torch.cat(expected))


def test_a_norm_of_ones_own_is_recorded_and_asked(run: Path) -> None:
    torch.manual_seed(0)
    norm = RECOGNISED["layer norm without a bias"][0]()
    model = nn.Sequential(nn.Linear(6, 6), norm, nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with dualform.record(model, optimizer, run, strict=True) as recorder:
        for step in range(12):
            recorder.annotate(sample=torch.arange(4) + 4 * step)
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
    memory = dualform.open(run)
    assert memory.verify(model).passed
    assert not memory.coverage.uncovered
    inputs = torch.randn(3, 6)
    layer = memory.attend(model, inputs)["1"]
    torch.testing.assert_close(layer.output(), model[:2](inputs).detach(), rtol=1e-4, atol=1e-5)
    totals = layer.totals("sample", of="contribution").values.sum(1) + layer.start()
    torch.testing.assert_close(totals, layer.output(), rtol=1e-4, atol=1e-5)
