"""Trails: all parameters of a step at once, and large layers as they are recorded."""

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dualform
from dualform.errors import RefusedError
from dualform.identity.parameter_use import ParameterUse
from dualform.recording.gradient_history import (
    Accumulation,
    GradientHistory,
    Resolution,
    fetch_histories,
    resolve,
    resolve_all,
)
from dualform.recording.probes import GradientProbes, Probe, ProbeSpec, predict, projection
from helpers.loops import gradient_of

CPU = torch.device("cpu")
WEIGHT = ParameterUse("weight", "fc.weight", "outer")
DTYPES = [torch.float32, torch.float64]
WIDE = (256, 300)
NARROW = (20, 30)


class Followed:
    """A weight whose gradient is accumulated and watched as the recorder does it."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.gauge = GradientProbes()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype))
        self.history = GradientHistory(shape[1])

    def accumulate(self, *, rows: int = 16, scale: float = 1.0, unseen: float = 0.0, coarse: bool = False) -> Tensor:
        """Add patterns to the gradient, and a part that no pattern explains; return the gradient, to be changed."""
        d_out, d_in = self.weight.shape
        keys = torch.randn(rows, d_in, dtype=self.weight.dtype)
        values = scale * torch.randn(rows, d_out, dtype=self.weight.dtype)
        before = self.gauge.probe("weight", self.weight, size="now")
        added = values.T @ keys + unseen * torch.randn(d_out, d_in, dtype=self.weight.dtype)
        self.weight.grad = added if self.weight.grad is None else self.weight.grad + added
        after = self.gauge.probe("weight", self.weight)
        assert after is not None
        columns = projection(d_out, d_in, dtype=self.weight.dtype, device=CPU)
        found = predict({WEIGHT: ProbeSpec(columns, self.weight.shape)}, values, keys, rounding=1.0)[WEIGHT]
        micro = len(self.history.accumulations)
        self.history.accumulations.append(Accumulation(micro, before, after, found.columns, [found.size], coarse))
        return self.weight.grad

    @property
    def seen(self) -> tuple[GradientHistory, Probe | None]:
        """The history, and the gradient as a step sees it."""
        return self.history, self.gauge.probe("weight", self.weight, size="later")

    @property
    def resolution(self) -> Resolution:
        return resolve(*self.seen)


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

FATES: dict[str, Callable[[Followed], object]] = {
    "untouched": lambda followed: None,
    "scaled": lambda followed: gradient_of(followed.weight).mul_(0.37),
    "cleared": lambda followed: gradient_of(followed.weight).zero_(),
    "gone": lambda followed: setattr(followed.weight, "grad", None),
    "edited": lambda followed: _element(gradient_of(followed.weight)),
    "not finite": lambda followed: gradient_of(followed.weight).mul_(math.nan),
    "accumulated": lambda followed: followed.accumulate(),
    "unexplained": lambda followed: followed.accumulate(unseen=0.1),
    "coarse": lambda followed: followed.accumulate(coarse=True),
    "tiny": lambda followed: followed.accumulate(scale=1e-40),
    "zero": lambda followed: followed.accumulate(scale=0.0),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_at_once_is_one_after_the_other(dtype: torch.dtype) -> None:
    drawn = random.Random(0)
    for seed in range(40):
        several = []
        for number in range(drawn.randint(1, 6)):
            followed = Followed(drawn.choice([WIDE, NARROW, (1, 5)]), dtype, seed=100 * seed + number)
            followed.accumulate(scale=drawn.choice([1.0, 1e-3, 0.0]), rows=drawn.choice([1, 16]))
            FATES[drawn.choice([*FATES, "untouched", "scaled", "scaled"])](followed)
            several.append(followed)
        seen = [followed.seen for followed in several]
        for together, alone in zip(resolve_all(seen), [resolve(*one) for one in seen], strict=True):
            assert together.objection == alone.objection
            assert together.factors == pytest.approx(alone.factors, rel=1e-6, nan_ok=True)
            assert together.residual == alone.residual


def test_all_at_once_looks_at_each_alone() -> None:
    """One that is edited is objected to whatever is with the others."""
    several = [Followed(shape, seed=number) for number, shape in enumerate([WIDE, NARROW, WIDE, NARROW])]
    for followed in several:
        followed.accumulate(scale=10.0 ** random.Random(0).randint(-8, 8)).mul_(0.5)
    for wrong in range(len(several)):
        gradient = several[wrong].weight.grad
        assert gradient is not None
        kept = gradient.clone()
        gradient[0, 0] *= 1.5
        found = resolve_all([followed.seen for followed in several])
        assert [resolution.objection is not None for resolution in found] == [i == wrong for i in range(len(several))]
        gradient.copy_(kept)


def test_what_needs_a_closer_look_gets_one() -> None:
    """Autocast's residual, and a gradient from before that is too small to be missed in the sum."""
    coarse, left = Followed(WIDE, seed=1), Followed(WIDE, seed=2)
    coarse.accumulate(coarse=True)
    left.weight.grad = torch.full(WIDE, 1e-12)
    left.accumulate()
    usual = Followed(WIDE, seed=3)
    usual.accumulate()
    found = resolve_all([coarse.seen, left.seen, usual.seen])
    assert found[0].residual is not None
    assert found[1].objection is not None
    assert "not cleared" in found[1].objection
    assert found[2] == Resolution({0: 1.0}, None)


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


def test_probes_in_the_memory_of_the_cpu_stay_where_they_are() -> None:
    """What a GPU's probes go through; here nothing has to move."""

    def probe(norm: bool) -> Probe:
        return Probe(torch.randn(3, 2), torch.randn(()) if norm else None)

    first = Accumulation(0, None, probe(True), torch.randn(3, 2), [lambda: 1.0])
    second = Accumulation(1, probe(False), probe(True), torch.randn(3, 2), [], coarse=True)
    seen = [(GradientHistory(4, [first, second]), probe(True)), (GradientHistory(1), None)]
    assert fetch_histories(seen) is seen
