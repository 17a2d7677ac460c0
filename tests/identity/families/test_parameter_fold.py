"""The live fold is the dense one: each share moved by every step's map, in float64, one share after the other."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from dualform.identity.families import optimizer_kinds
from dualform.identity.families.optimizer_kind import DoubtfulStep, ReplayedStep, StepMatrix, follow_together
from dualform.identity.families.optimizer_replay import OptimizerReplay, Share
from dualform.identity.families.parameter_fold import ParameterFold, UseRows, bias_rounding, bias_roundings
from dualform.identity.grouped_products import RowGroups
from dualform.identity.parameter_maps import BiasMap, OuterMap

make = torch.optim
OPTIMIZERS: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "SGD": lambda p: make.SGD(p, lr=0.1),
    "momentum": lambda p: make.SGD(p, lr=0.1, momentum=0.9, dampening=0.1),
    "decay": lambda p: make.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "Adam": lambda p: make.Adam(p, lr=1e-2, weight_decay=1e-2, maximize=True),
    "AdamW": lambda p: make.AdamW(p, lr=1e-2),
    "RAdam": lambda p: make.RAdam(p, lr=1e-2),
    "RMSprop": lambda p: make.RMSprop(p, lr=1e-3, momentum=0.5, weight_decay=1e-2),
    "Adadelta": lambda p: make.Adadelta(p, lr=0.3),
    "Muon": lambda p: make.Muon(p, lr=1e-2),
}


@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_live_fold_is_the_dense_one(name: str, warm: bool, divides: bool) -> None:
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
    optimizer = OPTIMIZERS[name]([parameter])
    kind = optimizer_kinds()[type(optimizer)]
    if warm:
        parameter.grad = torch.randn(3, 4, dtype=torch.float64)
        optimizer.step()
    state = dict(optimizer.state[parameter])
    average = state.get(kind.average) if kind.average else None
    initial = parameter.detach().clone()
    replay = OptimizerReplay(kind, initial, state)
    fold = ParameterFold(
        (3, 4),
        dtype=torch.float64,
        device=torch.device("cpu"),
        initial=lambda: initial,
        warm=None if average is None else average.clone(),
    )
    fold.divides = divides
    start, dense = replay.share(), [Share(torch.zeros_like(initial)) for _ in range(4)]
    for step in range(9):
        count = 4
        values, keys = torch.randn(count, 3, dtype=torch.float64), torch.randn(count, 4, dtype=torch.float64)
        codes = torch.tensor([0, 2, 0, 1]) if step < 4 else torch.tensor([3, 0, 3, 0])  # groups come and go
        beyond = torch.randn(3, 4, dtype=torch.float64)  # what no pattern explains
        gradient = values.T @ keys + beyond
        parameter.grad = gradient.clone()
        settings = kind.decode(kind.encode(optimizer.param_groups[0], optimizer.state[parameter]))
        before = optimizer.state[parameter].get(kind.average) if kind.average else None
        if fold.start.warm is not None or kind.decays_gradient(settings):
            fold.keep_average(before)
        kept = {n: optimizer.state[parameter][n].clone() for n in kind.overwrites_state if optimizer.state[parameter]}
        optimizer.step()
        after = dict(optimizer.state[parameter])
        linear = kind.read(ReplayedStep(settings, gradient, kept, after))
        rows = UseRows((0, 0, 0), OuterMap(), values, keys, codes, 1.0, RowGroups.of_codes(codes))
        live = after.get(kind.average) if kind.average else None
        follow_together(fold.step(linear, [rows], gradient=gradient, live_average=live))
        dense_linear = replay.step(settings, gradient)
        start.step(dense_linear, None)
        for group, share in enumerate(dense):
            mine = codes == group
            share.step(dense_linear, values[mine].T @ keys[mine] if bool(mine.any()) else None)
    found = {group: share for _, group, share in fold.parts()}
    for group, share in enumerate(dense):
        torch.testing.assert_close(found[group].weight, share.weight, rtol=1e-10, atol=1e-12)
    left, unexplained, rounding = fold.rest(parameter.detach())
    torch.testing.assert_close(left, start.weight, rtol=1e-10, atol=1e-12)
    assert float(unexplained.norm()) > 1e-3
    whole = left + sum(share.weight for share in found.values()) + unexplained + rounding
    torch.testing.assert_close(whole, parameter.detach(), rtol=1e-13, atol=1e-13)
    if name != "Muon":
        assert float(rounding.norm()) <= 1e-12 * float(parameter.detach().norm())


def test_matrices_of_steps_multiply_and_carry_the_earlier_gradient() -> None:
    first, second = StepMatrix((0.5, -1.0), (0.25, 0.9), (2.0, 3.0)), StepMatrix((1.5, 0.5), (0.0, 0.8), (9.0, 9.0))
    a = torch.tensor([first.weight, first.average])
    b = torch.tensor([second.weight, second.average])
    found = second.after(first)
    torch.testing.assert_close(torch.tensor([found.weight, found.average]), b @ a)
    torch.testing.assert_close(torch.tensor(found.gradient), b @ torch.tensor(first.gradient))


def two_groups(parameters: list[Tensor]) -> list[dict[str, Any]]:
    return [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.1}]


TOGETHER: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "AdamW, AMSGrad": lambda p: make.AdamW(p, lr=1e-2, amsgrad=True),
    "RMSprop, momentum": lambda p: make.RMSprop(p, lr=1e-3, momentum=0.5),
    "two rates": lambda p: make.Adam(two_groups(p), lr=1e-2),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_steps_of_several_parameters_are_read_and_doubted_as_each_by_itself(name: str) -> None:
    torch.manual_seed(0)
    parameters: list[Tensor] = [torch.nn.Parameter(torch.randn(shape)) for shape in ((3, 2), (4,), (1,), (5,))]
    optimizer = TOGETHER[name](parameters)
    kind = optimizer_kinds()[type(optimizer)]
    single, joined = ([kind.spread(one.shape) for one in parameters] for _ in range(2))
    for step in range(4):
        for place, one in enumerate(parameters):
            one.grad = None if place == step else torch.randn_like(one)
        optimizer.step()
        taken = {
            place: ReplayedStep(
                kind.decode(kind.encode(group, optimizer.state[one])), one.grad, {}, optimizer.state[one], torch.float32
            )
            for group in optimizer.param_groups
            for place, one in enumerate(parameters)
            if one.grad is not None and any(one is other for other in group["params"])
        }
        linears = kind.read_together(list(taken.values()))
        steps = []
        for (place, mine), linear in zip(taken.items(), linears, strict=True):
            alone, gradient = kind.read(mine), mine.gradient
            zero = torch.zeros_like(gradient)
            assert all(map(torch.equal, linear.step(zero, zero, gradient), alone.step(zero, zero, gradient)))
            steps.append(DoubtfulStep(linear, mine.settings, 1e-7 * torch.rand_like(gradient)))
            spread = single[place]
            assert spread is not None
            spread.step(alone, mine.settings, steps[-1].doubt)
        spreads = [spread for place in taken if (spread := joined[place]) is not None]
        type(spreads[0]).step_together(spreads, steps)
    for expected, found in zip(single, joined, strict=True):
        assert expected is not None
        assert found is not None
        torch.testing.assert_close(found.size, expected.size, rtol=1e-12, atol=0)
        torch.testing.assert_close(found.state, expected.state, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_of_a_bias_is_that_of_its_sum_and_of_its_dtype(dtype: torch.dtype) -> None:
    values = torch.randn(7, 3).to(dtype)
    groups = RowGroups.of_codes(torch.zeros(7, dtype=torch.int64))
    keys = torch.ones(7, 1, dtype=dtype)
    rows = UseRows((0, 0, 0), BiasMap(), values, keys, torch.zeros(7), -0.5, groups)
    expected = 0.5 * 2.0**-24 * values.double().abs().sum(0)
    if dtype == torch.bfloat16:
        expected += 0.5 * 2.0**-8 * values.double().sum(0).abs()
    found = bias_rounding([rows], (3,), torch.float32)
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
    together = bias_roundings([[rows], [rows, rows], []], [(3,)] * 3, torch.float32)
    torch.testing.assert_close(together[0], found, rtol=1e-6, atol=0)
    torch.testing.assert_close(together[1], 2 * found, rtol=1e-6, atol=0)
    assert together[2] == 0.0


@pytest.mark.parametrize("decay", [0.3, 1.0])
def test_divided_weights_follow_another_optimizer_and_a_decay_that_leaves_nothing(decay: float) -> None:
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
    initial = parameter.detach().clone()
    folds = [
        ParameterFold((3, 4), dtype=torch.float64, device=torch.device("cpu"), initial=lambda: initial, warm=None)
        for _ in range(2)
    ]
    folds[1].divides = True
    codes = torch.tensor([0, 1, 0])
    for optimizer in (make.SGD([parameter], lr=0.1), make.AdamW([parameter], lr=1.0, weight_decay=decay)):
        kind = optimizer_kinds()[type(optimizer)]
        for _ in range(2):
            values, keys = torch.randn(3, 3, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
            gradient = values.T @ keys
            parameter.grad = gradient.clone()
            settings = kind.decode(kind.encode(optimizer.param_groups[0], optimizer.state[parameter]))
            optimizer.step()
            after = dict(optimizer.state[parameter])
            linear = kind.read(ReplayedStep(settings, gradient, {}, after))
            rows = UseRows((0, 0, 0), OuterMap(), values, keys, codes, 1.0, RowGroups.of_codes(codes))
            live = after.get(kind.average) if kind.average else None
            for fold in folds:
                follow_together(fold.step(linear, [rows], gradient=gradient, live_average=live))
    plain, divided = ({group: share.weight for _, group, share in fold.parts()} for fold in folds)
    for group, weight in plain.items():
        torch.testing.assert_close(divided[group], weight, rtol=1e-12, atol=1e-13)
    for fold in folds:
        assert float(fold.rest(parameter.detach())[2].norm()) < 1e-12
