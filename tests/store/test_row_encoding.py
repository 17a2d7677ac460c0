"""Row-scaled float16 and int8: scales, a bounded error, rounding that is right on average, measured on whole runs."""

from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

import dualform
from dualform.effects.losses import find_losses
from dualform.engine.local import LocalExecutor
from dualform.engine.measures import Of
from dualform.recording.watch import Dtype
from dualform.store import row_encoding
from dualform.store.reader import Run
from dualform.store.row_encoding import address_seed, decode, encode
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


# int8 ---------------------------------------------------------------------------------------------------------------


def mixed(number: int) -> int:
    """MurmurHash3's last step, in Python's own integers."""
    number ^= number >> 16
    number = number * 0x85EBCA6B & 0xFFFFFFFF
    number ^= number >> 13
    number = number * 0xC2B2AE35 & 0xFFFFFFFF
    return number ^ number >> 16


def round_plainly(row: list[float], place: int, seed: int) -> list[int]:
    """Round one row of float32 numbers to int8 as the format says, one element after the other."""
    largest = torch.tensor(max(map(abs, row)))
    scale = largest * torch.tensor(1 / 127)
    found = []
    for column, element in enumerate(row):
        of_row = mixed(place ^ seed & 0xFFFFFFFF) ^ seed >> 32
        noise = mixed(of_row ^ mixed(column // 2 ^ 0x5BD1E995)) >> (16 if column % 2 else 0) & 0xFFFF
        noise = (noise + 0x8000) & 0xFFFF  # as an offset from the least number of 16 bits with a sign
        quotient = torch.tensor(element) / scale + (noise + 0.5) / 65536
        found.append(max(-127, min(127, int(quotient.floor()))))
    return found


@given(rows=st.integers(1, 4), width=st.integers(1, 7), seed=st.integers(0, 2**64 - 1))
def test_int8_rounds_as_the_format_says(rows: int, width: int, seed: int) -> None:
    exact = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed % 1000))
    stored, _ = encode(exact, torch.int8, seed=seed)
    assert stored.tolist() == [round_plainly(row, i, seed) for i, row in enumerate(exact.tolist())]


@pytest.mark.parametrize("elements", [1, 7, 64])
def test_int8_does_not_depend_on_how_many_rows_are_rounded_at_once(
    monkeypatch: pytest.MonkeyPatch, elements: int
) -> None:
    exact = torch.randn(50, 7)
    whole = encode(exact, torch.int8, seed=3)
    monkeypatch.setattr(row_encoding, "MAX_CHUNK_ELEMENTS", elements)
    for one, other in zip(whole, encode(exact, torch.int8, seed=3), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@given(
    rows=st.integers(0, 5),
    width=st.integers(0, 6),
    exponent=st.integers(-100, 120),
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_int8_is_off_by_less_than_a_unit_and_keeps_signs_and_zeros(
    rows: int, width: int, exponent: int, seed: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randint(-4, 1, (rows, width), generator=generator).double()
    exact = (torch.randn(rows, width, generator=generator, dtype=torch.float64) * 10**spread * 2.0**exponent).to(dtype)
    exact = exact * (torch.rand(rows, width, generator=generator) < 0.8)
    stored, scales = encode(exact, torch.int8, seed=seed)
    assert stored.dtype == torch.int8
    assert scales is not None
    assert scales.dtype == torch.float32
    back = decode(stored, scales, torch.float64)
    unit = exact.double().abs().amax(dim=1, keepdim=True) / 127 if width and rows else torch.zeros(rows, 1)
    assert bool(((back - exact.double()).abs() <= 1.00001 * unit).all())
    assert bool((back * exact >= 0).all())
    assert not back[exact == 0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_element_of_a_row_is_127_units_however_its_quotient_is_rounded(dtype: torch.dtype) -> None:
    """So that the unit is known again from a row; in one row of 100,000 the largest element is 126 units."""
    exact = torch.randn(2_000_000, 1, generator=torch.Generator().manual_seed(0)).to(dtype)
    stored = encode(exact, torch.int8, seed=0)[0].int()
    assert bool((stored * exact.sign().int() >= 126).all())
    assert int((stored.abs() == 127).sum()) > 1_999_900


def test_int8_is_right_on_average_over_addresses() -> None:
    """The mean over calls, and over the rows of a call, is the exact row; errors of two columns are independent."""
    exact = torch.tensor([[1.0, -0.9, 0.5, 0.01, 0.003, -0.002, 0.0, 0.7]]) * 0.37
    unit = float(exact.max()) / 127
    over_calls = torch.cat(
        [
            decode(*encode(exact, torch.int8, seed=address_seed("a", "keys", i, 0, 0)), torch.float64)
            for i in range(4000)
        ]
    )
    over_rows = decode(*encode(exact.expand(50_000, 8), torch.int8, seed=1), torch.float64)
    for found in (over_calls, over_rows):
        quotients = exact.double() / unit
        part = quotients - quotients.floor()
        deviation = (part * (1 - part)).sqrt().clamp(min=1e-4) * unit / len(found) ** 0.5
        assert bool(((found.mean(dim=0) - exact) / deviation).abs().max() < 4.5)
        off = found - exact
        moving = off.std(dim=0) > 1e-3 * unit
        correlations = torch.corrcoef(off[:, moving].T).fill_diagonal_(0.0)
        assert float(correlations.abs().max()) < 4.5 / len(found) ** 0.5


def test_a_row_that_is_not_finite_does_not_come_back_finite() -> None:
    exact = torch.tensor([[1.0, float("nan")], [float("inf"), 1.0], [1.0, 2.0]])
    back = decode(*encode(exact, torch.int8, seed=0), torch.float32)
    assert not back[:2].isfinite().any()
    assert bool(back[2].isfinite().all())


def wide_run(path: Path, dtype: Dtype, **options: object) -> tuple[nn.Module, dualform.Memory, Tensor]:
    """Record a small classifier whose keys and values are wide enough for sums to average rounding out."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    with dualform.record(model, optimizer, path, dtype=dtype, **options) as recorder:  # type: ignore[arg-type]
        for _ in range(40):
            inputs = torch.randn(32, 24, generator=generator)
            labels = inputs[:, :10].argmax(dim=1)
            recorder.annotate(label=labels)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    return model, dualform.open(path), torch.randn(20, 24, generator=generator)


def test_an_int8_run_is_near_the_exact_one_and_within_its_bound(tmp_path: Path) -> None:
    model, exact, queries = wide_run(tmp_path / "float32", None)
    _, coarse, _ = wide_run(tmp_path / "int8", "int8")
    check = coarse.verify(model)
    assert check.passed, check
    for parameter in (found for layer in check.layers for found in layer.parameters):
        assert 1e-4 < parameter.relative < 1e-2, "int8 must have been stored, and average out"
        # The bound is 4 measured standard deviations and 2e-3 of the change: neither too tight nor too loose.
        assert 1.5 * parameter.error < parameter.bound < 15 * parameter.error
    for name, live in model.named_parameters():
        edited = {other: p.detach().clone() for other, p in model.named_parameters()}
        edited[name] += 0.1 * (live.detach() - exact._run.initial[name])
        assert not coarse.verify(edited).passed
    errors: dict[Of, float] = {"attention": 4e-3, "magnitude": 4e-3, "contribution": 1e-2}
    for name in ("0", "2"):
        one, other = (memory.attend(model, queries)[name] for memory in (exact, coarse))
        for of, most in errors.items():
            ours, theirs = (spotlight.totals(by="label", of=of).values for spotlight in (other, one))
            assert relative(ours, theirs) < most
        best = [spot.top(10, of="magnitude").patterns.flatten(1) for spot in (one, other)]
        shared = [len(set(a.tolist()) & set(b.tolist())) for a, b in zip(*best, strict=True)]
        assert sum(shared) / len(shared) >= 9
    assert coarse.info().layers["2"]["dtype"] == "int8"
    assert find_losses(coarse._run, LocalExecutor(), ["0", "2"]).softmax


def test_what_int8_stores_does_not_depend_on_how_a_run_is_written(tmp_path: Path) -> None:
    wide_run(tmp_path / "whole", "int8")
    wide_run(tmp_path / "parted", "int8", shard_bytes=100_000, layers=["2", "0"])
    whole, parted = Run(tmp_path / "whole"), Run(tmp_path / "parted")
    assert len(parted.shards) > len(whole.shards)
    for layer in ("0", "2"):
        for what in ("keys", "values"):
            ours, theirs = (
                torch.cat([shard.rows(layer, what).take(slice(None))[0] for shard in run.shards])
                for run in (whole, parted)
            )
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize(("small", "passes"), [(1.0, True), (2e-2, True), (1e-3, False)])
def test_int8_under_adam_passes_with_its_residual_while_that_leaves_a_proof(
    tmp_path: Path, small: float, passes: bool
) -> None:
    """Keys with one large element, and others that are a part of a unit: Adam moves their weights all the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 16, bias=False))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with dualform.record(model, optimizer, tmp_path / "run", dtype="int8"):
        for step in range(30):
            inputs = small * torch.randn(16, 24, generator=torch.Generator().manual_seed(step))
            inputs[:, 0] = 1.0
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), inputs[:, 1:17].argmax(dim=1)).backward()
            optimizer.step()
    memory = dualform.open(tmp_path / "run")
    check = memory.verify(model)
    assert check.passed == passes, check
    assert (check.layers[0].error or 0) > 2e-3, "or this shows nothing"
    change = {name: p.detach() - memory._run.initial[name] for name, p in model.named_parameters()}
    assert not memory.verify({name: p.detach() + change[name] for name, p in model.named_parameters()}).passed


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    model = network()
    with pytest.raises(ValueError, match=r"dtype is 'int4'; expected None .*float16.* or .int8"):
        dualform.record(model, sgd(model), tmp_path / "run", dtype={"0": "int4"})  # type: ignore[dict-item]
