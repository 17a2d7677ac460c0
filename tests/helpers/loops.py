"""Small training loops for the tests of the recording side, and what they all check."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dualform

WITHIN = {torch.float32: 1e-5, torch.float64: 1e-12}  # of the change
Body = Callable[[Tensor], Any]


def mlp(
    *, dtype: torch.dtype = torch.float32, bias: bool = True, inplace: bool = False, seed: int = 0
) -> nn.Sequential:
    """Return a network of the linear layers "0" (5 to 7) and "2" (7 to 3)."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7, bias=bias), nn.ReLU(inplace=inplace), nn.Linear(7, 3, bias=bias)).to(dtype)


def sgd(model: nn.Module, **settings: Any) -> torch.optim.SGD:
    """Return SGD with momentum, unless told otherwise."""
    return torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, **settings})


def batches(steps: int, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> list[Tensor]:
    """Return one batch per step, of shape (4, 5) or what is given."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(*(shape or (4, 5)), generator=generator, dtype=torch.float64).to(dtype) + 0.3 for _ in range(steps)
    ]


def loss_of(output: Tensor) -> Tensor:
    """Return a loss whose errors differ between rows and units."""
    target = torch.arange(output.shape[-1], dtype=output.dtype) - 1
    return (output - target).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: list[Tensor]) -> None:
    """Train plainly."""
    for x in inputs:
        optimizer.zero_grad()
        loss_of(model(x)).backward()
        optimizer.step()


def record(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    body: Body | None = None,
    steps: int = 6,
    **options: Any,
) -> dualform.Memory:
    """Record a loop, whose body takes a batch and does everything but zero_grad, and open the memory."""
    with dualform.record(model, optimizer, path, **options):
        for x in batches(steps, dtype=next(model.parameters()).dtype):
            optimizer.zero_grad()
            if body is None:
                loss_of(model(x)).backward()
                optimizer.step()
            else:
                body(x)
    return dualform.open(path)


def gradient_of(parameter: Tensor) -> Tensor:
    """Return the gradient of a parameter that has one."""
    assert parameter.grad is not None
    return parameter.grad


def state(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the model's parameters."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def worst(memory: dualform.Memory, model: nn.Module) -> float:
    """Return the largest error of a rebuilt parameter relative to its change."""
    return max(layer.error or 0.0 for layer in memory.verify(model).layers)


def assert_exact(memory: dualform.Memory, model: nn.Module) -> None:
    """Check that `verify` passes and that every parameter is rebuilt within rounding of its change."""
    verification = memory.verify(model)
    assert verification.passed, verification
    assert any(layer.patterns for layer in verification.layers)
    assert worst(memory, model) <= WITHIN[next(model.parameters()).dtype], verification


def counts(memory: dualform.Memory) -> dict[str, int]:
    """Return the number of patterns by layer."""
    return {name: memory.patterns(name).num_rows for name in memory.layers}


def leftovers(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return everything that hangs on a model and its optimizer and runs when they do."""
    found = []
    for name, module in model.named_modules():
        found += [f"{name}.{kind}" for kind, hooks in vars(module).items() if kind.endswith("_hooks") and hooks]
        found += [f"{name}.{kind}" for kind, hooks in vars(module).items() if "_hooks_" in kind and hooks]
    for name, parameter in model.named_parameters():
        found += [
            f"{name}.{kind}" for kind in ("_backward_hooks", "_post_accumulate_grad_hooks") if getattr(parameter, kind)
        ]
        found += [f"{name}.{kind}" for kind in vars(parameter)]
    found += [kind for kind, hooks in vars(optimizer).items() if kind.startswith("_optimizer_") and hooks]
    return found


def tolerances(dtype: torch.dtype) -> dict[str, Any]:
    """Return the tolerances of `torch.testing.assert_close` for answers that are equal but for rounding."""
    return {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-11}
