"""Row-scaled float16: exact scales, a bounded error, measured on whole runs."""

from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import dualform
from dualform.store.row_encoding import decode, encode
from helpers.small import batch, network, sgd, train

HALF = 2.0**-11  # of an element near the row's largest, the relative rounding of float16


@given(
    rows=st.integers(0, 5),
    width=st.integers(1, 6),
    exponent=st.integers(-120, 120),
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_the_error_of_a_row_is_bounded_by_its_largest_element(
    rows: int, width: int, exponent: int, seed: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randint(-9, 1, (rows, width), generator=generator).double()
    exact = (torch.randn(rows, width, generator=generator, dtype=torch.float64) * 10**spread * 2.0**exponent).to(dtype)
    stored, scales = encode(exact, torch.float16)
    assert stored.dtype == torch.float16
    assert scales is not None
    assert scales.dtype == torch.float32
    assert scales.shape == (rows,)
    assert bool(((torch.frexp(scales).mantissa == 0.5) | (scales == 0)).all()), "scales are powers of two"
    back = decode(stored, scales, torch.float64)
    error = (back - exact.double()).abs()
    largest = exact.double().abs().amax(dim=1, keepdim=True) if width and rows else torch.zeros(rows, 1)
    # The smallest scale is float32's smallest normal number: below it a row fades out.
    assert bool((error <= HALF * largest + 2.0**-151).all())


@pytest.mark.parametrize("value", [0.0, 1e-9, 3e-38, 1e-45, 65504.0, 1e30, 3.4e38])
def test_extreme_rows_come_back(value: float) -> None:
    exact = torch.tensor([[value, -value / 2, 0.0]])
    back = decode(*encode(exact, torch.float16), torch.float32)
    torch.testing.assert_close(back, exact, rtol=HALF, atol=1e-45)


def test_rows_below_the_range_of_float32_are_as_good_as_zero() -> None:
    exact = torch.tensor([[1e-200, -1e-200]], dtype=torch.float64)
    back = decode(*encode(exact, torch.float16), torch.float64)
    torch.testing.assert_close(back, torch.zeros_like(exact), rtol=0, atol=1e-41)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_are_stored_as_they_are(dtype: torch.dtype) -> None:
    exact = torch.randn(4, 3, dtype=dtype)
    stored, scales = encode(exact, dtype)
    assert scales is None
    torch.testing.assert_close(decode(stored, scales, dtype), exact, rtol=0, atol=0)


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.mostly_slow(fast=1)
@pytest.mark.parametrize("scale", [1.0, 1e-9], ids=["ordinary", "values around 1e-9"])
def test_the_float16_error_of_a_run_is_below_its_promise(tmp_path: Path, scale: float) -> None:
    """The same training twice: stored as trained, and as float16. Rebuilt weights, totals and outputs are compared."""
    memories = {}
    for dtype in (None, "float16"):
        model = network()
        optimizer = sgd(model, lr=0.05 / scale, weight_decay=0.0)
        path = tmp_path / str(dtype)
        with dualform.record(model, optimizer, path, dtype=dtype, shard_bytes=20_000) as recorder:
            train(model, optimizer, range(200), recorder, scale=scale)
        memories[dtype] = dualform.open(path)
    assert memories["float16"].verify(model).passed
    exact, half = memories[None], memories["float16"]
    if scale != 1.0:
        values = exact._run.parts()[0].rows("0", "values").take(slice(None))[0]
        assert float(values.abs().max()) < 1e-8, "the values must be far below float16's range for this test to tell"
    queries = batch(10_000, rows=40)[0]
    errors = {}
    for name, share in exact.shares().items():
        errors[f"share of {name}"] = relative(half.shares()[name], share)
    for layer in ("0", "2"):
        one, other = (memory.attend(model, queries)[layer] for memory in (exact, half))
        for of in ("attention", "magnitude", "contribution"):
            errors[f"{of} of {layer}"] = relative(
                other.totals(by="label", of=of).values, one.totals(by="label", of=of).values
            )
        errors[f"output of {layer}"] = relative(other.output(), one.output())
    print({name: f"{error:.1e}" for name, error in errors.items()})
    assert max(errors.values()) < 2e-3, errors
    assert max(errors.values()) > 1e-7, "float16 must have been stored at all"


def test_float16_keeps_the_sign_of_keys_so_that_the_magnitude_shortcut_stays_exact() -> None:
    tiny = torch.tensor([[1.0, 1e-12, 0.0]])
    back = decode(*encode(tiny, torch.float16), torch.float32)
    assert bool((back >= 0).all())


def test_a_float64_run_stays_float64_to_the_end(tmp_path: Path) -> None:
    model = network(dtype=torch.float64)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        train(model, optimizer, range(100), recorder)
    memory = dualform.open(tmp_path / "run")
    check = memory.verify(model)
    assert check.passed
    assert max(layer.error for layer in check.layers if layer.error is not None) < 1e-12
    inputs = batch(10_000, dtype=torch.float64)[0]
    layer = memory.attend(model, inputs)["0"]
    assert layer.attention().dtype == layer.output().dtype == torch.float64
    torch.testing.assert_close(layer.output(), model[0](inputs).detach(), rtol=1e-12, atol=1e-12)
