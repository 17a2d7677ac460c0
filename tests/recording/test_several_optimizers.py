"""Several optimizers in one run: what a step is, and that every parameter is rebuilt, whoever trains it."""

import copy
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer, RMSprop

import dualform
from dualform.errors import RefusedError
from helpers.loops import assert_exact, batches, counts, leftovers, loss_of, mlp

MATRICES = {"0.weight", "2.weight"}


def divide(model: nn.Module, names: Iterable[str] = MATRICES) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters with these names, and the others."""
    chosen = set(names)
    parameters = dict(model.named_parameters())
    return [p for n, p in parameters.items() if n in chosen], [p for n, p in parameters.items() if n not in chosen]


def two(model: nn.Module) -> tuple[Optimizer, Optimizer]:
    matrices, others = divide(model)
    return SGD(matrices, lr=0.05, momentum=0.9), AdamW(others, lr=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_a_layer_divided_between_two_optimizers_keeps_one_row_per_pattern(tmp_path: Path, dtype: torch.dtype) -> None:
    model = mlp(dtype=dtype)
    plain = copy.deepcopy(model)
    for net, path in ((model, tmp_path / "run"), (plain, None)):
        optimizers = two(net)
        with dualform.record(net, optimizers, path, strict=True) if path else nullcontext() as recorder:
            for x in batches(40, dtype=dtype):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss_of(net(x)).backward()
                for optimizer in optimizers:
                    optimizer.step()
            if recorder is not None:
                assert recorder.step == 40
        assert not any(leftovers(net, optimizer) for optimizer in optimizers)
    assert all(torch.equal(p, plain.get_parameter(name)) for name, p in model.named_parameters())
    memory = dualform.open(tmp_path / "run")
    assert memory.info().steps == 40
    assert counts(memory) == {"0": 160, "2": 160}
    assert_exact(memory, model)
    assert memory.at(step=0).weights()["0.weight"].shape == (7, 5)
    layer = memory.attend(model, batches(1, 3, 5, dtype=dtype, seed=5)[0])["2"]
    with torch.no_grad():
        hidden = torch.relu(model[0](batches(1, 3, 5, dtype=dtype, seed=5)[0]))
        torch.testing.assert_close(layer.output(), model[2](hidden), rtol=1e-4, atol=1e-5)
    totals = layer.totals(by="step", of="contribution").values.sum(1)
    torch.testing.assert_close(layer.contributions().sum(1), totals.to(dtype), rtol=1e-3, atol=1e-5)


def test_optimizers_that_step_in_turn_make_steps_of_their_own(tmp_path: Path) -> None:
    """As a generator and a discriminator do: each backward reaches both, each step moves one."""
    model = nn.ModuleDict({"makes": nn.Linear(3, 4), "judges": nn.Linear(4, 1)})
    torch.manual_seed(0)
    makes, judges = SGD(model["makes"].parameters(), lr=0.1), RMSprop(model["judges"].parameters(), lr=1e-2)
    with dualform.record(model, [makes, judges], tmp_path / "run", strict=True) as recorder:
        for x in batches(20, 6, 3):
            judges.zero_grad()
            (model["judges"](model["makes"](x).detach().tanh()) - 1).square().mean().backward()
            judges.step()
            makes.zero_grad()
            model["judges"](model["makes"](x).tanh()).square().mean().backward()
            makes.step()
        assert recorder.step == 39  # the last one may still be joined
    memory = dualform.open(tmp_path / "run")
    assert memory.info().steps == 40
    assert counts(memory) == {"makes": 120, "judges": 120}
    assert_exact(memory, model)


def test_an_optimizer_that_steps_less_often_gets_all_that_was_accumulated(tmp_path: Path) -> None:
    model = mlp(dtype=torch.float64)
    often, seldom = two(model)
    with dualform.record(model, [often, seldom], tmp_path / "run", strict=True):
        for i, x in enumerate(batches(30, dtype=torch.float64)):
            often.zero_grad()
            loss_of(model(x)).backward()
            often.step()
            if i % 3 == 2:
                seldom.step()
                seldom.zero_grad()
    memory = dualform.open(tmp_path / "run")
    assert memory.info().steps == 30
    assert_exact(memory, model)


def test_what_is_cleared_before_its_optimizer_steps_never_counts(tmp_path: Path) -> None:
    model = mlp(dtype=torch.float64)
    first, second = two(model)
    with dualform.record(model, [first, second], tmp_path / "run", strict=True):
        for i, x in enumerate(batches(12, dtype=torch.float64)):
            model.zero_grad()
            loss_of(model(x)).backward()
            first.step()
            if i % 2:
                second.zero_grad()
            second.step()
    assert_exact(dualform.open(tmp_path / "run"), model)


@pytest.mark.parametrize("then", ["flush", "close"])
def test_a_step_that_only_one_took_part_in_is_kept(tmp_path: Path, then: str) -> None:
    model = mlp(dtype=torch.float64)
    first, second = two(model)
    with dualform.record(model, [first, second], tmp_path / "run", strict=True) as recorder:
        for x in batches(3, dtype=torch.float64):
            model.zero_grad()
            loss_of(model(x)).backward()
            first.step()
        if then == "flush":
            recorder.flush()
            memory = dualform.open(tmp_path / "run")
            assert memory.info().steps == 3
            assert_exact(memory, model)
    assert_exact(dualform.open(tmp_path / "run"), model)


def test_a_gradient_that_only_one_optimizer_used_is_refused_when_applied_again(tmp_path: Path) -> None:
    model = mlp()
    first, second = two(model)
    x = batches(1)[0]
    with dualform.record(model, [first, second], tmp_path / "run", strict=True):
        loss_of(model(x)).backward()
        first.step()
        with pytest.raises(RefusedError, match="not cleared"):
            first.step()


def test_resumes(tmp_path: Path) -> None:
    model = mlp(dtype=torch.float64)
    optimizers = two(model)

    def go(inputs: list[Tensor], **options: Any) -> None:
        with dualform.record(model, optimizers, tmp_path / "run", strict=True, **options):
            for x in inputs:
                model.zero_grad()
                loss_of(model(x)).backward()
                for optimizer in optimizers:
                    optimizer.step()

    inputs = batches(20, dtype=torch.float64)
    go(inputs[:8])
    go(inputs[8:], resume=True)
    memory = dualform.open(tmp_path / "run")
    assert memory.info().steps == 20
    assert_exact(memory, model)


def test_refuses_by_name(tmp_path: Path) -> None:
    model = mlp()
    matrices, others = divide(model)
    with pytest.raises(RefusedError, match="LBFGS is not an optimizer"):
        dualform.record(model, [SGD(matrices, lr=0.1), torch.optim.LBFGS(others)], tmp_path / "a")
    with pytest.raises(RefusedError, match=r"'0.weight' is trained by SGD and by AdamW"):
        dualform.record(model, [SGD(model.parameters(), lr=0.1), AdamW(matrices)], tmp_path / "b")
    with pytest.raises(ValueError, match="at least one optimizer"):
        dualform.record(model, [], tmp_path / "c")
    with pytest.raises(TypeError, match="no optimizer of torch"):
        dualform.record(model, [model], tmp_path / "d")  # type: ignore[list-item]
    assert not list(tmp_path.iterdir())


def test_one_optimizer_with_groups_of_different_settings(tmp_path: Path) -> None:
    model = mlp(dtype=torch.float64)
    matrices, others = divide(model)
    optimizer = AdamW([{"params": matrices, "lr": 1e-2}, {"params": others, "lr": 1e-3, "weight_decay": 0.0}])
    with dualform.record(model, optimizer, tmp_path / "run", strict=True):
        for x in batches(15, dtype=torch.float64):
            optimizer.zero_grad()
            loss_of(model(x)).backward()
            optimizer.step()
    assert_exact(dualform.open(tmp_path / "run"), model)
