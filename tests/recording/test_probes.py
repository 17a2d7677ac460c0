"""Probes: no false alarm over rounding, none missed over a change; and what a history of them resolves to."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dualform.identity.parameter_use import ParameterUse
from dualform.recording.gradient_history import Accumulation, GradientHistory, Resolution, resolve
from dualform.recording.probes import Probe, ProbeSpec, predict, probe
from dualform.recording.probes import projection as columns_of

CPU = torch.device("cpu")
WEIGHT, BIAS = ParameterUse("weight", "fc.weight", "outer"), ParameterUse("bias", "fc.bias", "bias")
DTYPES = [torch.float32, torch.float64]


def patterns(rows: int, d_in: int, d_out: int, dtype: torch.dtype, *, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return random keys and values."""
    return torch.randn(rows, d_in, dtype=dtype) + offset, torch.randn(rows, d_out, dtype=dtype)


def accumulate(gradient: Tensor | None, keys: Tensor, values: Tensor, micro: int = 0) -> tuple[Tensor, Accumulation]:
    """Add patterns to a weight's gradient; return it and what the hooks would measure."""
    columns = columns_of(values.shape[1], keys.shape[1], dtype=keys.dtype, device=CPU)
    after = values.T @ keys if gradient is None else gradient + values.T @ keys
    taken = probe(after, columns)
    found = predict({WEIGHT: ProbeSpec(columns, after.shape)}, values, keys, rounding=1.0)[WEIGHT]
    before = None if gradient is None else probe(gradient, columns)
    return after, Accumulation(micro, before, taken, found.columns, [found.size])


def seen(gradient: Tensor) -> Probe:
    return probe(gradient, columns_of(*gradient.shape, dtype=gradient.dtype, device=CPU))


def resolved(gradient: Tensor, event: Accumulation) -> Resolution:
    return resolve(GradientHistory(gradient.shape[1], [event]), seen(gradient))


# No false alarm ----------------------------------------------------------------------------------------------------


@pytest.mark.mostly_slow(fast=3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "d_in", "d_out", "offset"),
    [(1, 1, 1, 0.0), (1, 1024, 1, 0.0), (1, 64, 1, 5.0), (8, 16, 3, 3.0), (64, 256, 10, 1.0), (2000, 8, 2, 100.0)],
)
def test_rounding_is_no_objection(dtype: torch.dtype, rows: int, d_in: int, d_out: int, offset: float) -> None:
    """Small batches and single outputs are the hard ones: all columns of a projection may happen to cancel."""
    torch.manual_seed(0)
    for _ in range(1500 if rows * d_in * d_out < 5000 else 60):
        keys, values = patterns(rows, d_in, d_out, dtype, offset=offset)
        gradient, first = accumulate(None, keys, values)
        keys, values = patterns(rows, d_in, d_out, dtype, offset=offset)
        gradient, second = accumulate(gradient, keys, 1e-3 * values, micro=1)
        factor = float(torch.rand(()) * 3)
        resolution = resolve(GradientHistory(d_in, [first, second]), seen(gradient * factor))
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
        gradient, event = accumulate(None, keys, values * 10.0**exponent)
        resolution = resolved(0.37 * gradient, event)
        assert resolution.objection is None
        if exponent > -35:
            assert resolution.factors == {0: pytest.approx(0.37, rel=1e-5)}
        assert math.isfinite(resolution.factors[0])
        keys, values = patterns(rows, 20, 4, dtype)
        assert (
            resolve(GradientHistory(20, [accumulate(None, keys * 10.0**exponent, values)[1]]), None).objection is None
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_projection_that_nearly_cancels_is_no_objection(dtype: torch.dtype) -> None:
    """Its rounding is that of the gradient, not that of the little which is left."""
    torch.manual_seed(0)
    columns = columns_of(1, 1000, dtype=torch.float64, device=CPU)
    for _ in range(20):
        key = torch.randn(1, 1000, dtype=torch.float64)
        hidden = key - key @ columns @ torch.linalg.pinv(columns)  # seen by no column
        keys, values = (hidden + 1e-3 * key).to(dtype), torch.randn(1, 1, dtype=dtype)
        gradient, first = accumulate(None, keys, values)
        assert first.after.columns.norm() < 0.01 * first.after.size
        gradient, second = accumulate(gradient, keys.flip(0), -0.3 * values, micro=1)
        resolution = resolve(GradientHistory(1000, [first, second]), seen(0.37 * gradient))
        assert resolution.objection is None
        assert resolution.factors[0] == pytest.approx(0.37, rel=1e-3)


@pytest.mark.mostly_slow(fast=1)
@pytest.mark.parametrize("shape", [(128, 64), (256, 256), (512, 1024)])
def test_a_gradient_of_one_pattern_is_no_objection(shape: tuple[int, int]) -> None:
    """Of rank one: what all columns see of it may happen to be next to nothing."""
    torch.manual_seed(0)
    columns = columns_of(*shape, dtype=torch.float32, device=CPU)
    for _ in range(1000):
        key, value = torch.randn(1, shape[1]), torch.randn(1, shape[0])
        gradient, event = accumulate(None, key, value)
        final = probe(0.3737 * gradient, columns, size="later")
        assert resolve(GradientHistory(shape[1], [event]), final).objection is None
        before = probe(0.3737 * gradient, columns, size="now")
        after, second = accumulate(0.3737 * gradient, key, value, micro=1)
        again = Accumulation(1, before, second.after, second.predicted, second.sizes)
        assert resolve(GradientHistory(shape[1], [event, again]), probe(after, columns, size="later")).objection is None


def test_huge_gradients_are_not_beyond_objection() -> None:
    """Even where the square of a gradient overflows."""
    torch.manual_seed(0)
    keys, values = patterns(4, 20, 4, torch.float32)
    gradient, event = accumulate(None, keys, values * 1e25)
    gradient[1, 2] *= 1.01
    assert resolved(gradient, event).objection is not None


def test_tiny_changes_of_ordinary_gradients_are_measured_not_ignored() -> None:
    """The allowance for denormal numbers is no loophole: at ordinary sizes it is nothing."""
    gradient, event = accumulate(None, *patterns(4, 20, 4, torch.float64))
    assert resolved(gradient + 1e-9, event).objection is not None


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


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_other_change_is_objected_to(dtype: torch.dtype, change: str) -> None:
    for seed in range(50):
        torch.manual_seed(seed)
        gradient, event = accumulate(None, *patterns(16, 30, 8, dtype))
        CHANGES[change](gradient)
        resolution = resolved(gradient, event)
        assert resolution.objection is not None
        assert "other than one factor" in resolution.objection
        assert math.isnan(resolution.factors[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share", [1.0, 1e-3])
def test_an_unseen_use_of_the_weight_is_objected_to(dtype: torch.dtype, share: float) -> None:
    for seed in range(50):
        torch.manual_seed(seed)
        keys, values = patterns(16, 30, 8, dtype)
        unseen_keys, unseen_values = patterns(16, 30, 8, dtype)
        columns = columns_of(8, 30, dtype=dtype, device=CPU)
        after = probe(values.T @ keys + share * unseen_values.T @ unseen_keys, columns)
        found = predict({WEIGHT: ProbeSpec(columns, (8, 30))}, values, keys, rounding=1.0)[WEIGHT]
        resolution = resolve(GradientHistory(30, [Accumulation(0, None, after, found.columns, [found.size])]), after)
        assert resolution.objection is not None
        assert "patterns do not explain" in resolution.objection


def test_an_unseen_use_of_a_bias_is_objected_to() -> None:
    values = torch.randn(16, 8)
    after = probe(values.sum(0) + 1e-3, None)
    found = predict({BIAS: ProbeSpec(None, (8,))}, values, torch.randn(16, 3), rounding=1.0)[BIAS]
    assert (
        resolve(GradientHistory(1, [Accumulation(0, None, after, found.columns, [found.size])]), after).objection
        is not None
    )


def test_a_gradient_without_any_pattern_is_objected_to() -> None:
    after = seen(torch.randn(4, 5))
    predicted = torch.zeros_like(after.columns)
    objection = resolve(GradientHistory(5, [Accumulation(0, None, after, predicted, [])]), after).objection
    assert objection is not None
    assert "no recorded pattern explains" in objection


# Trails ------------------------------------------------------------------------------------------------------------


def test_an_untouched_gradient_has_factor_one() -> None:
    gradient, event = accumulate(None, *patterns(4, 5, 3, torch.float32))
    assert resolved(gradient, event) == Resolution({0: 1.0}, None)


def test_factors_multiply_along_the_trail() -> None:
    gradient, first = accumulate(None, *patterns(4, 5, 3, torch.float64))
    gradient, second = accumulate(2.0 * gradient, *patterns(4, 5, 3, torch.float64), micro=1)
    resolution = resolve(GradientHistory(5, [first, second]), seen(-3.0 * gradient))
    assert resolution.objection is None
    assert resolution.factors == {0: pytest.approx(-6.0, rel=1e-12), 1: pytest.approx(-3.0, rel=1e-12)}


@pytest.mark.parametrize("to_none", [True, False])
def test_cleared_gradients_have_factor_zero(*, to_none: bool) -> None:
    gradient, first = accumulate(None, *patterns(4, 5, 3, torch.float64))
    left = None if to_none else torch.zeros_like(gradient)
    gradient, second = accumulate(left, *patterns(4, 5, 3, torch.float64), micro=1)
    history = GradientHistory(5, [first, second])
    assert resolve(history, seen(gradient)) == Resolution({0: 0.0, 1: 1.0}, None)
    assert resolve(history, None) == Resolution({0: 0.0, 1: 0.0}, None)
    assert resolve(history, seen(torch.zeros(3, 5, dtype=torch.float64))) == Resolution({0: 0.0, 1: 0.0}, None)


def test_a_true_zero_gradient_is_not_cleared() -> None:
    gradient, event = accumulate(None, torch.randn(4, 5), torch.zeros(4, 3))
    assert resolved(gradient, event) == Resolution({0: 1.0}, None)


def test_an_objection_goes_when_the_gradient_is_cleared() -> None:
    gradient, wrong = accumulate(None, *patterns(4, 5, 3, torch.float64))
    wrong = Accumulation(0, None, wrong.after, 2 * wrong.predicted, wrong.sizes)
    fresh, right = accumulate(None, *patterns(4, 5, 3, torch.float64), micro=1)
    assert resolve(GradientHistory(5, [wrong]), seen(gradient)).objection is not None
    assert resolve(GradientHistory(5, [wrong, right]), seen(fresh)).objection is None


def test_an_edit_goes_when_the_gradient_is_cleared() -> None:
    gradient, first = accumulate(None, *patterns(4, 5, 3, torch.float64))
    gradient, second = accumulate(gradient.clamp(-0.1, 0.1), *patterns(4, 5, 3, torch.float64), micro=1)
    fresh, third = accumulate(None, *patterns(4, 5, 3, torch.float64), micro=2)
    assert resolve(GradientHistory(5, [first, second]), seen(gradient)).objection is not None
    assert resolve(GradientHistory(5, [first, second, third]), seen(fresh)) == Resolution(
        {0: 0.0, 1: 0.0, 2: 1.0}, None
    )


def test_a_gradient_from_before_is_objected_to() -> None:
    gradient, event = accumulate(torch.randn(3, 5), *patterns(4, 5, 3, torch.float32))
    objection = resolved(gradient, event).objection
    assert objection is not None
    assert "not cleared after the previous step" in objection
    assert resolve(GradientHistory(5), seen(gradient)).objection is not None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_objected_to(bad: float) -> None:
    keys, values = patterns(4, 5, 3, torch.float32)
    values[0, 0] = bad
    gradient, event = accumulate(None, keys, values)
    assert resolved(gradient, event).objection == "its gradient is not finite"
    sound, event_before = accumulate(None, keys.abs(), values.nan_to_num(1.0, posinf=1.0))
    assert resolved(sound * bad, event_before).objection == "its gradient is not finite"
    assert resolve(GradientHistory(5, [event]), None) == Resolution({0: 0.0}, None)  # skipped by a scaler, then cleared
