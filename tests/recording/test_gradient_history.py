"""Gradients and their patterns: no false alarm over rounding, none missed over a change; and what histories come to."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dualform.recording.gradient_check import GradientCheck, Resolution
from dualform.recording.gradient_history import (
    Accumulation,
    GradientHistory,
    common_factor,
    follow_all,
    follow_views,
)
from dualform.recording.gradient_samples import plan_sample, take_sample
from helpers.gradients import FollowedWeight

DTYPES = [torch.float32, torch.float64]


def patterns(rows: int, d_in: int, d_out: int, dtype: torch.dtype, *, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return random keys and values."""
    return torch.randn(rows, d_in, dtype=dtype) + offset, torch.randn(rows, d_out, dtype=dtype)


# No false alarm ----------------------------------------------------------------------------------------------------


@pytest.mark.mostly_slow(fast=3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("full", [True, False], ids=["full", "sampled"])
@pytest.mark.parametrize(
    ("rows", "d_in", "d_out", "offset"),
    [(1, 1, 1, 0.0), (1, 1024, 1, 0.0), (1, 64, 1, 5.0), (8, 16, 3, 3.0), (64, 256, 10, 1.0), (2000, 8, 2, 100.0)],
)
def test_rounding_is_no_objection(
    dtype: torch.dtype, rows: int, d_in: int, d_out: int, offset: float, *, full: bool
) -> None:
    """Small batches and single outputs are the hard ones: all columns of a projection may happen to cancel."""
    torch.manual_seed(0)
    for _ in range(500 if rows * d_in * d_out < 5000 else 60):
        followed = FollowedWeight(d_out, d_in, dtype, full=full)
        followed.accumulate(*patterns(rows, d_in, d_out, dtype, offset=offset))
        keys, values = patterns(rows, d_in, d_out, dtype, offset=offset)
        followed.accumulate(keys, 1e-3 * values)
        factor = float(torch.rand(()) * 3)
        followed.gradient.mul_(factor)
        resolution = followed.resolution
        assert resolution.objection is None
        assert resolution.factors[0] == pytest.approx(factor, rel=1e-3)  # exact enough even where a projection cancels
        assert resolution.factors[1] == resolution.factors[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("exponent", [-44, -40, -30, -24, -23, -22, -15, 0, 15, 20, 30])
def test_neither_tiny_nor_huge_gradients_are_objected_to(dtype: torch.dtype, exponent: int) -> None:
    """A confident network's errors are denormal numbers, and a loss scale can make them huge."""
    torch.manual_seed(0)
    for rows in (1, 5):
        keys, values = patterns(rows, 20, 4, dtype)
        for full in (True, False):
            followed = FollowedWeight(4, 20, dtype, full=full).accumulate(keys, values * 10.0**exponent)
            followed.gradient.mul_(0.37)
            resolution = followed.resolution
            assert resolution.objection is None
            if exponent > -35:
                assert resolution.factors == {0: pytest.approx(0.37, rel=1e-5)}
            assert math.isfinite(resolution.factors[0])
            followed = FollowedWeight(4, 20, dtype, full=full).accumulate(keys * 10.0**exponent, values)
            followed.parameter.grad = None
            assert followed.resolution.objection is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_projection_that_nearly_cancels_is_no_objection(dtype: torch.dtype) -> None:
    """Its rounding is that of the gradient, not that of the little which is left."""
    torch.manual_seed(0)
    for _ in range(20):
        followed = FollowedWeight(1, 1000, dtype)
        columns = followed.check.columns("weight", followed.parameter)
        assert columns is not None
        columns = columns.double()
        key = torch.randn(1, 1000, dtype=torch.float64)
        hidden = key - key @ columns @ torch.linalg.pinv(columns)  # seen by no column
        keys, values = (hidden + 1e-3 * key).to(dtype), torch.randn(1, 1, dtype=dtype)
        followed.accumulate(keys, values)
        assert followed.history.accumulations[0].after.elements.norm() < 0.01 * followed.gradient.norm()
        followed.accumulate(keys.flip(0), -0.3 * values)
        followed.gradient.mul_(0.37)
        resolution = followed.resolution
        assert resolution.objection is None
        assert resolution.factors[0] == pytest.approx(0.37, rel=1e-3)


@pytest.mark.mostly_slow(fast=1)
@pytest.mark.parametrize("shape", [(128, 64), (256, 256), (512, 1024)])
def test_a_gradient_of_one_pattern_is_no_objection(shape: tuple[int, int]) -> None:
    """Of rank one: what all columns see of it may happen to be next to nothing."""
    torch.manual_seed(0)
    for _ in range(300):
        key, value = torch.randn(1, shape[1]), torch.randn(1, shape[0])
        followed = FollowedWeight(*shape).accumulate(key, value)
        followed.gradient.mul_(0.3737)
        assert followed.resolution.objection is None
        followed.accumulate(key, value)
        assert followed.resolution.objection is None


def test_huge_gradients_are_not_beyond_objection() -> None:
    """Even where the square of a gradient overflows."""
    torch.manual_seed(0)
    keys, values = patterns(4, 20, 4, torch.float32)
    followed = FollowedWeight(4, 20).accumulate(keys, values * 1e25)
    followed.gradient[1, 2] *= 1.01
    assert followed.resolution.objection is not None


def test_tiny_changes_of_ordinary_gradients_are_measured_not_ignored() -> None:
    """The allowance for denormal numbers is no loophole: at ordinary sizes it is nothing."""
    followed = FollowedWeight(4, 20, torch.float64).accumulate(*patterns(4, 20, 4, torch.float64))
    followed.gradient.add_(1e-9)
    assert followed.resolution.objection is not None


# None missed -------------------------------------------------------------------------------------------------------


def _element(gradient: Tensor) -> None:
    gradient[1, 2] *= 1.01


def _noise(gradient: Tensor) -> None:
    gradient += 1e-4 * gradient.norm() / math.sqrt(gradient.numel()) * torch.randn_like(gradient)


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "clipping by value": lambda gradient: gradient.clamp_(-1.0, 1.0),
    "one element": _element,
    "noise": _noise,
    "centralisation": lambda gradient: gradient.sub_(gradient.mean(dim=1, keepdim=True)),
    "sign": lambda gradient: gradient.sign_(),
    "one row": lambda gradient: gradient[0].mul_(0.5),
    "one column": lambda gradient: gradient[:, 0].mul_(0.5),
    "permutation": lambda gradient: gradient.copy_(gradient.flip(0)),
    "replacement": lambda gradient: gradient.copy_(torch.randn_like(gradient)),
}
EVERYWHERE = [name for name in CHANGES if not name.startswith("one")]  # changes that every sample shows


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_other_change_is_objected_to(dtype: torch.dtype, change: str) -> None:
    for seed in range(50):
        torch.manual_seed(seed)
        followed = FollowedWeight(8, 30, dtype).accumulate(*patterns(16, 30, 8, dtype))
        CHANGES[change](followed.gradient)
        resolution = followed.resolution
        assert resolution.objection is not None
        assert "other than one factor" in resolution.objection
        assert math.isnan(resolution.factors[0])


@pytest.mark.parametrize("change", EVERYWHERE)
def test_a_change_of_all_elements_is_objected_to_in_any_step(change: str) -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        followed = FollowedWeight(80, 300, full=False).accumulate(*patterns(16, 300, 80, torch.float32))
        CHANGES[change](followed.gradient)
        resolution = followed.resolution
        assert resolution.objection is not None
        assert "other than one factor" in resolution.objection


def test_a_change_of_one_element_is_left_to_the_next_full_check() -> None:
    torch.manual_seed(0)
    for full in (True, False):
        followed = FollowedWeight(80, 300, full=full).accumulate(*patterns(16, 300, 80, torch.float32))
        followed.gradient[1, 2] += followed.gradient.norm() / 10
        assert (followed.resolution.objection is not None) is full


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share", [1.0, 1e-3])
def test_an_unseen_use_of_the_weight_is_objected_to(dtype: torch.dtype, share: float) -> None:
    for seed in range(50):
        torch.manual_seed(seed)
        keys, values = patterns(16, 30, 8, dtype)
        unseen_keys, unseen_values = patterns(16, 30, 8, dtype)
        followed = FollowedWeight(8, 30, dtype)
        resolution = followed.accumulate(keys, values, unseen=share * unseen_values.T @ unseen_keys).resolution
        assert resolution.objection is not None
        assert "patterns do not explain" in resolution.objection


def test_an_unseen_use_of_a_bias_is_objected_to() -> None:
    followed = FollowedWeight(8, 3, bias=True)
    followed.accumulate(torch.randn(16, 3), torch.randn(16, 8), unseen=torch.full((8,), 1e-3))
    assert followed.resolution.objection is not None


def test_a_gradient_without_any_pattern_is_objected_to() -> None:
    followed = FollowedWeight(4, 5).accumulate(torch.zeros(0, 5), torch.zeros(0, 4), unseen=torch.randn(4, 5))
    objection = followed.resolution.objection
    assert objection is not None
    assert "no recorded pattern explains" in objection


# Histories ---------------------------------------------------------------------------------------------------------

FULL = pytest.mark.parametrize("full", [True, False], ids=["full", "sampled"])


@FULL
def test_an_untouched_gradient_has_factor_one(*, full: bool) -> None:
    followed = FollowedWeight(3, 5, full=full).accumulate(*patterns(4, 5, 3, torch.float32))
    assert followed.resolution == Resolution({0: 1.0}, None)


@FULL
@pytest.mark.parametrize("shape", [(3, 5), (80, 300)])
def test_factors_multiply_along_the_history(shape: tuple[int, int], *, full: bool) -> None:
    followed = FollowedWeight(*shape, torch.float64, full=full)
    followed.accumulate(*patterns(4, shape[1], shape[0], torch.float64)).gradient.mul_(2.0)
    followed.accumulate(*patterns(4, shape[1], shape[0], torch.float64)).gradient.mul_(-3.0)
    resolution = followed.resolution
    assert resolution.objection is None
    assert resolution.factors == {0: pytest.approx(-6.0, rel=1e-12), 1: pytest.approx(-3.0, rel=1e-12)}


@FULL
@pytest.mark.parametrize("to_none", [True, False])
def test_cleared_gradients_have_factor_zero(*, to_none: bool, full: bool) -> None:
    followed = FollowedWeight(3, 5, torch.float64, full=full).accumulate(*patterns(4, 5, 3, torch.float64))
    followed.parameter.grad = None if to_none else torch.zeros_like(followed.gradient)
    followed.accumulate(*patterns(4, 5, 3, torch.float64))
    assert followed.resolution == Resolution({0: 0.0, 1: 1.0}, None)
    followed.parameter.grad = None
    assert followed.resolution == Resolution({0: 0.0, 1: 0.0}, None)
    followed.parameter.grad = torch.zeros(3, 5, dtype=torch.float64)
    assert followed.resolution == Resolution({0: 0.0, 1: 0.0}, None)


@FULL
def test_a_true_zero_gradient_is_not_cleared(*, full: bool) -> None:
    followed = FollowedWeight(3, 5, full=full).accumulate(torch.randn(4, 5), torch.zeros(4, 3))
    assert followed.resolution == Resolution({0: 1.0}, None)


def test_an_objection_goes_when_the_gradient_is_cleared() -> None:
    followed = FollowedWeight(3, 5, torch.float64)
    followed.accumulate(*patterns(4, 5, 3, torch.float64), unseen=torch.ones(3, 5, dtype=torch.float64))
    assert followed.resolution.objection is not None
    followed.parameter.grad = None
    assert followed.accumulate(*patterns(4, 5, 3, torch.float64)).resolution.objection is None


@FULL
def test_an_edit_goes_when_the_gradient_is_cleared(*, full: bool) -> None:
    followed = FollowedWeight(3, 5, torch.float64, full=full).accumulate(*patterns(4, 5, 3, torch.float64))
    followed.gradient.clamp_(-0.1, 0.1)
    followed.accumulate(*patterns(4, 5, 3, torch.float64))
    assert followed.resolution.objection is not None
    followed.parameter.grad = None
    followed.accumulate(*patterns(4, 5, 3, torch.float64))
    assert followed.resolution == Resolution({0: 0.0, 1: 0.0, 2: 1.0}, None)


@FULL
def test_a_gradient_from_before_is_objected_to(*, full: bool) -> None:
    followed = FollowedWeight(3, 5, full=full)
    followed.parameter.grad = torch.randn(3, 5)
    followed.accumulate(*patterns(4, 5, 3, torch.float32))
    objection = followed.resolution.objection
    assert objection is not None
    assert "not cleared after the previous step" in objection
    followed = FollowedWeight(3, 5, full=full)
    followed.parameter.grad = torch.randn(3, 5)
    assert followed.resolution.objection is not None


@FULL
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_objected_to(bad: float, *, full: bool) -> None:
    keys, values = patterns(4, 5, 3, torch.float32)
    values[0, 0] = bad
    followed = FollowedWeight(3, 5, full=full).accumulate(keys, values)
    assert followed.resolution.objection == "its gradient is not finite"
    followed.parameter.grad = None
    assert followed.resolution == Resolution({0: 0.0}, None)  # skipped by a scaler, then cleared
    sound = FollowedWeight(3, 5, full=full).accumulate(keys.abs(), values.nan_to_num(1.0, posinf=1.0))
    sound.gradient.mul_(bad)
    assert sound.resolution.objection == "its gradient is not finite"


def test_a_gradient_of_few_rows_is_seen_through_random_columns() -> None:
    """The rows of a table that few tokens chose: a sample of elements would hold none of them."""
    torch.manual_seed(0)
    keys, values = torch.randn(2, 50), torch.zeros(2, 400)
    values[:, 2] = 1.0
    followed = FollowedWeight(400, 50, full=False).accumulate(keys, values)
    assert followed.history.accumulations[0].after.projected
    followed.gradient.mul_(0.25)
    assert followed.resolution.factors == {0: pytest.approx(0.25, rel=1e-5)}
    followed.gradient[2, :5] = 0.0
    assert followed.resolution.objection is not None


def test_a_gradient_that_its_sample_does_not_show_is_compared_with_its_patterns() -> None:
    """As on a GPU, where the elements are looked at only at the step."""
    torch.manual_seed(0)
    keys, values = torch.randn(2, 50), torch.zeros(2, 400)
    values[:, 2] = 1.0
    followed = FollowedWeight(400, 50, full=False).accumulate(keys, values)
    (event,) = followed.history.accumulations
    event.after = take_sample(followed.gradient, followed.check.columns("weight", followed.parameter), projected=False)
    assert event.after.blind
    followed.gradient.mul_(0.25)
    assert followed.resolution.objection is None
    assert followed.resolution.factors == {0: pytest.approx(0.25, rel=1e-5)}
    followed.gradient[2, :5] = 0.0
    assert followed.resolution.objection is not None


EDITS: dict[str, Callable[[Tensor], object]] = {
    "nothing": lambda gradient: None,
    "a factor": lambda gradient: gradient.mul_(0.5),
    "an element of the sample": lambda gradient: gradient.view(-1)[0].add_(1.0),
    "not a number": lambda gradient: gradient.view(-1)[0].fill_(math.nan),
    "cleared": lambda gradient: gradient.zero_(),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("edited", [0, 1])
def test_gradients_seen_all_at_once_are_those_seen_one_by_one(edit: str, edited: int) -> None:
    weight, bias = (torch.nn.Parameter(torch.zeros(shape)) for shape in ((40, 30), (40,)))
    parameters, check = {"weight": weight, "bias": bias}, GradientCheck()
    histories = []
    for name, parameter in parameters.items():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        after = check.sample(name, parameter, parameter.grad)
        assert after is not None
        histories.append(GradientHistory(parameter.shape[1:].numel(), [Accumulation(0, None, after)]))
    gradient = (weight, bias)[edited].grad
    assert gradient is not None
    EDITS[edit](gradient)
    unused = torch.nn.Parameter(torch.zeros(3))
    parameters["unused"] = unused
    finals = [
        check.sample(name, one, one.grad, projected=False, look="at the step") for name, one in parameters.items()
    ]
    followed = follow_all(list(zip([*histories, GradientHistory(1)], finals, strict=True)))
    gradients = [parameter.grad for parameter in parameters.values()]
    found = follow_views([*histories, None], check.views(parameters), gradients)
    assert (found is not None) == (edit in ("nothing", "a factor"))
    assert found is None or found == followed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", [0.1, 0.999, -3.0, 1e-12])
def test_a_factor_that_all_gradients_share_is_found_from_all_of_them(dtype: torch.dtype, factor: float) -> None:
    before = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=dtype)
    now = before * factor
    found = common_factor(before.double().numpy(), now.double().numpy(), torch.finfo(dtype).eps)
    assert found == pytest.approx(factor, rel=torch.finfo(dtype).eps)


@pytest.mark.parametrize("edit", ["one part", "one element", "cleared", "not a number", "infinite", "added"])
def test_what_is_no_common_factor_is_not_taken_for_one(edit: str) -> None:
    """A factor that differs in one gradient alone by more than rounding is that gradient's own."""
    before = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    now = before * 0.1
    match edit:
        case "one part":
            now[900:] *= 1 + 1e-6
        case "one element":
            now[7] *= 1 + 1e-6
        case "cleared":
            now.zero_()
        case "not a number":
            now[3] = math.nan
        case "infinite":
            now[3] = math.inf
        case "added":
            now += 1e-6
    assert common_factor(before.double().numpy(), now.double().numpy(), torch.finfo(torch.float32).eps) is None


def test_gradients_that_were_infinite_before_the_step_are_not_called_unchanged() -> None:
    bias = torch.nn.Parameter(torch.zeros(4))
    bias.grad = torch.tensor([1.0, math.inf, 2.0, 3.0])
    check = GradientCheck()
    after = check.sample("bias", bias, bias.grad)
    assert after is not None
    history = GradientHistory(1, [Accumulation(0, None, after)])
    assert follow_views([history], check.views({"bias": bias}), [bias.grad]) is None


def test_a_gradient_that_nothing_accumulated_is_not_followed_by_its_view() -> None:
    bias = torch.nn.Parameter(torch.zeros(4))
    bias.grad = torch.ones(4)
    assert follow_views([None], GradientCheck().views({"bias": bias}), [bias.grad]) is None


@pytest.mark.parametrize("shape", [(7,), (3, 5), (16, 16), (40, 30), (64, 3, 3, 3), (513, 1)])
def test_a_planned_sample_has_the_elements_of_one_that_is_asked_for(shape: tuple[int, ...]) -> None:
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    plan = plan_sample(gradient)
    assert plan is not None
    view = plan.view(gradient)
    assert view is not None
    columns = None if len(shape) == 1 else torch.ones(gradient[0].numel(), 1)
    assert torch.equal(view, take_sample(gradient, columns, projected=False).elements)
    assert plan.view(gradient.double()) is None
    assert len(shape) == 1 or plan.view(gradient.transpose(0, -1).contiguous().transpose(0, -1)) is None or 1 in shape
