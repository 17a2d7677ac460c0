"""Gradients of all parameters of a step at once, and of large layers as they are recorded."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dualform
from dualform.errors import RefusedError
from dualform.recording import gradient_check
from dualform.recording.gradient_history import Accumulation, GradientHistory, fetch_histories, follow, follow_all
from dualform.recording.gradient_samples import GradientSample
from dualform.recording.probes import predict
from helpers.gradients import FollowedWeight
from helpers.loops import gradient_of

DTYPES = [torch.float32, torch.float64]
WIDE = (256, 300)
NARROW = (20, 30)


def _element(gradient: Tensor) -> None:
    gradient[-1, 2] += 0.1 * gradient.norm() / math.sqrt(gradient.numel())


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "clipping by value": lambda gradient: gradient.clamp_(-1.0, 1.0),
    "one element": _element,
    "centralisation": lambda gradient: gradient.sub_(gradient.mean(dim=1, keepdim=True)),
    "one row": lambda gradient: gradient[0].mul_(0.5),
    "one column": lambda gradient: gradient[:, 0].mul_(0.5),
    "permutation": lambda gradient: gradient.copy_(gradient.flip(0)),
}


# All at once -------------------------------------------------------------------------------------------------------

FATES: dict[str, Callable[[FollowedWeight], object]] = {
    "untouched": lambda followed: None,
    "scaled": lambda followed: followed.gradient.mul_(0.37),
    "cleared": lambda followed: followed.gradient.zero_(),
    "gone": lambda followed: setattr(followed.parameter, "grad", None),
    "edited": lambda followed: _element(followed.gradient),
    "not finite": lambda followed: followed.gradient.mul_(math.nan),
    "accumulated": lambda followed: add(followed),
    "tiny": lambda followed: add(followed, scale=1e-40),
    "zero": lambda followed: add(followed, scale=0.0),
}


def add(followed: FollowedWeight, *, rows: int = 16, scale: float = 1.0) -> None:
    d_out, d_in = followed.parameter.shape
    dtype = followed.parameter.dtype
    followed.accumulate(torch.randn(rows, d_in, dtype=dtype), scale * torch.randn(rows, d_out, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("full", [True, False], ids=["full", "sampled"])
def test_all_at_once_is_one_after_the_other(dtype: torch.dtype, *, full: bool) -> None:
    drawn = random.Random(0)
    torch.manual_seed(0)
    for _ in range(40):
        several = []
        for _ in range(drawn.randint(1, 6)):
            followed = FollowedWeight(*drawn.choice([WIDE, NARROW, (1, 5)]), dtype, full=full)
            add(followed, scale=drawn.choice([1.0, 1e-3, 0.0]), rows=drawn.choice([1, 16]))
            FATES[drawn.choice([*FATES, "untouched", "scaled", "scaled"])](followed)
            several.append(followed)
        seen = [followed.seen for followed in several]
        for together, alone in zip(follow_all(seen), [follow(*one) for one in seen], strict=True):
            assert together.objection == alone.objection
            assert together.of == pytest.approx(alone.of, rel=1e-6, nan_ok=True)


def test_all_at_once_looks_at_each_alone() -> None:
    """One that is edited is objected to whatever is with the others."""
    torch.manual_seed(0)
    several = [FollowedWeight(*shape, full=False) for shape in [WIDE, NARROW, WIDE, NARROW]]
    for number, followed in enumerate(several):
        add(followed, scale=10.0 ** (3 * number - 6))
        followed.gradient.mul_(0.5)
    for wrong in range(len(several)):
        gradient = several[wrong].gradient
        kept = gradient.clone()
        gradient[0, 0] *= 1.5  # the first element is in every sample
        found = follow_all([followed.seen for followed in several])
        assert [factors.objection is not None for factors in found] == [i == wrong for i in range(len(several))]
        gradient.copy_(kept)


def test_the_residual_of_autocast_is_found_in_every_step() -> None:
    followed = FollowedWeight(*WIDE, full=False)
    followed.accumulate(torch.randn(4, 300), torch.randn(4, 256), coarse=torch.bfloat16)
    assert followed.resolution.residual is not None


# Recorded ----------------------------------------------------------------------------------------------------------


def train(model: nn.Module, folder: Path, change: Callable[[nn.Module], object], *, term: float = 0.0) -> float:
    """Record three steps of two backwards each, their gradients changed before the step; return the rebuild's error."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with dualform.record(model, optimizer, folder):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            for _ in range(2):
                loss = model(torch.randn(8, 300, dtype=next(model.parameters()).dtype)).square().mean()
                loss = loss + term * sum(p.square().sum() for p in model.parameters())
                loss.backward()
            change(model)
            optimizer.step()
    checks = dualform.open(folder).verify().layers
    return max(math.inf if check.error is None else check.error for check in checks)


def test_large_layers_are_recorded_exactly(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 256), nn.Tanh(), nn.Linear(256, 300)).double()
    error = train(model, tmp_path / "run", lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
    assert error < 1e-11  # the change is small beside the weight


@pytest.mark.parametrize("change", CHANGES)
def test_large_layers_are_not_recorded_otherwise(tmp_path: Path, change: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(300, 256)
    with pytest.raises(RefusedError, match="weight"):
        train(model, tmp_path / "run", lambda _: CHANGES[change](gradient_of(model.weight).mul_(1e4)))


def test_a_regulariser_of_a_large_layer_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with pytest.raises(RefusedError, match="regulariser"):
        train(nn.Linear(300, 256), tmp_path / "run", lambda _: None, term=1e-3)


def _clip_largest(gradient: Tensor) -> None:
    gradient.clamp_(-float(limit := gradient.abs().flatten().kthvalue(gradient.numel() - 10).values), float(limit))


def _clear_row(gradient: Tensor) -> None:
    gradient[3] = 0.0


@pytest.mark.parametrize("kind", ["linear", "autocast", "lstm", "offset"])
@pytest.mark.parametrize("change", [_clip_largest, _clear_row], ids=["largest", "row"])
def test_edits_are_refused_where_predictions_are_coarse(
    tmp_path: Path, kind: str, change: Callable[[Tensor], None]
) -> None:
    """A gradient is compared with itself, whatever its prediction rounds: autocast, gates, keys with a large mean."""
    torch.manual_seed(0)
    model: nn.Module = nn.LSTM(128, 128) if kind == "lstm" else nn.Linear(300, 256)
    weight = model.weight_hh_l0 if isinstance(model, nn.LSTM) else model.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        inputs = torch.randn(6, 8, 128) if kind == "lstm" else torch.randn(16, 300) + 100 * (kind == "offset")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast"):
            output = model(inputs)
        (output[0] if kind == "lstm" else output.float()).square().mean().backward()
        assert isinstance(weight.grad, Tensor)
        change(weight.grad)
        optimizer.step()

    refuses(step, model, optimizer, tmp_path, match="other than one factor")


def refuses(
    step: Callable[[], None], model: nn.Module, optimizer: torch.optim.Optimizer, path: Path, *, match: str
) -> None:
    """Record a step that has to be refused."""
    with dualform.record(model, optimizer, path / "run"), pytest.raises(RefusedError, match=match):
        step()


@pytest.mark.parametrize("shape", [(20, 1), (20, 3), (300, 256)])
def test_keys_of_bfloat16_layers_are_recorded(tmp_path: Path, shape: tuple[int, int]) -> None:
    model = nn.Linear(*shape).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", layers={"*": "keys"}):
        model(torch.randn(8, shape[0], dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
    assert dualform.open(tmp_path / "run").patterns("").num_rows == 8


def test_keys_of_a_gradient_that_is_masked_are_recorded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(300, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", layers={"*": "keys"}):
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(16, 300)).square().mean().backward()
            assert model.weight.grad is not None
            model.weight.grad[3:] = 0.0
            optimizer.step()
    assert dualform.open(tmp_path / "run").patterns("").num_rows == 80


@pytest.mark.parametrize("shape", [(300, 256), (30, 20)])
def test_backwards_that_cancel_what_is_not_seen_are_refused(tmp_path: Path, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(*shape, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(4, shape[0])

    def step() -> None:
        model(inputs).sum().backward()
        nn.functional.linear(inputs, model.weight).sum().mul(-1).backward()
        assert model.weight.grad is not None
        assert not model.weight.grad.any()
        optimizer.step()

    refuses(step, model, optimizer, tmp_path, match="weight")


WIDE_SUMS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "convolution": lambda: (
        nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 9)
        ),
        torch.rand(128, 3, 32, 32),
    ),
    "linear": lambda: (nn.Linear(6, 3), torch.randint(-1, 2, (20_000, 6)).float()),
    "narrow": lambda: (nn.Linear(1, 1), torch.randn(100_000, 1)),
    "mlp": lambda: (nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1)), torch.randn(50_000, 2)),
}


@pytest.mark.parametrize("kind", WIDE_SUMS)
def test_the_rounding_of_sums_over_many_patterns_is_no_objection(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    model, inputs = WIDE_SUMS[kind]()
    output = model(inputs)
    targets = torch.arange(len(inputs)) % 9 if kind == "convolution" else torch.ones_like(output)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with dualform.record(model, optimizer, tmp_path / "run"):
        for _ in range(3):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy if kind == "convolution" else nn.functional.mse_loss
            loss(model(inputs), targets).backward()
            optimizer.step()
    assert dualform.open(tmp_path / "run").verify()


def test_a_regulariser_beside_many_patterns_is_refused(tmp_path: Path) -> None:
    """What rounding of a long sum explains is far less than that."""
    torch.manual_seed(0)
    model, inputs = WIDE_SUMS["mlp"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        loss = (model(inputs) - 1).square().mean() + 1e-3 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        optimizer.step()

    refuses(step, model, optimizer, tmp_path, match="regulariser")


def test_samples_are_fetched_as_they_are() -> None:
    """What a GPU's samples go through; here nothing has to move."""
    elements = torch.randn(6)

    def sample(factor: float, *, norm: bool) -> GradientSample:
        return GradientSample(factor * elements, norm=torch.ones(()) if norm else None)

    first = Accumulation(0, None, sample(1.0, norm=True))
    second = Accumulation(1, sample(0.5, norm=False), sample(3.0, norm=True))
    seen = [(GradientHistory(4, [first, second]), sample(0.75, norm=True)), (GradientHistory(1), None)]
    assert follow(*seen[0]).of == pytest.approx({0: 0.125, 1: 0.25})
    for (history, final), (found, found_final) in zip(seen, fetch_histories(seen), strict=True):
        assert follow(history, final) == follow(found, found_final)
        assert [event.micro for event in history.accumulations] == [event.micro for event in found.accumulations]


def test_many_small_calls_of_a_layer_are_compared_together(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of what calls predict is what their patterns predict together, and an edit is refused all the same."""
    asked = []

    def counted(specs: Any, values: Tensor, keys: Tensor, **options: Any) -> Any:
        asked.append(len(values))
        return predict(specs, values, keys, **options)

    monkeypatch.setattr(gradient_check, "predict", counted)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, run):
        for wrong in (False, True):
            optimizer.zero_grad()
            torch.stack([model(torch.randn(rows, 4)).square().sum() for rows in (1, 2, 1)]).sum().backward()
            if wrong:
                model[0].weight.grad.add_(1e-3 * torch.randn(6, 4))  # type: ignore[union-attr,operator]
                with pytest.raises(RefusedError, match=r"'0.weight'"):
                    optimizer.step()
            else:
                optimizer.step()
                assert asked == [4, 4]
