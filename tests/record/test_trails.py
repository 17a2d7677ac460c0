"""Trails: large gradients that are followed through a sample, and all parameters of a step at once."""

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dualform
from dualform.errors import RefusedError
from dualform.record.gauge import Gauge
from dualform.record.probes import LARGE, SAMPLED, TELLING, Probe, Watching, predict, projection, sample, sampled
from dualform.record.trails import Accumulation, Resolution, Trail, resolve, resolve_all

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64]
WIDE = (256, 300)  # a gradient that is large enough to be followed through a sample
NARROW = (20, 30)


class Followed:
    """A weight whose gradient is accumulated and watched as the recorder does it."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.gauge = Gauge()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype))
        self.trail = Trail(shape[1])

    def accumulate(self, *, rows: int = 16, scale: float = 1.0, unseen: float = 0.0, coarse: bool = False) -> Tensor:
        """Add patterns to the gradient, and a part that no pattern explains; return the gradient, to be changed."""
        d_out, d_in = self.weight.shape
        keys = torch.randn(rows, d_in, dtype=self.weight.dtype)
        values = scale * torch.randn(rows, d_out, dtype=self.weight.dtype)
        before = self.gauge.probe("weight", self.weight, self.trail.last, whole=self.trail.last is None, size="now")
        added = values.T @ keys + unseen * torch.randn(d_out, d_in, dtype=self.weight.dtype)
        self.weight.grad = added if self.weight.grad is None else self.weight.grad + added
        after = self.gauge.follow("weight", self.weight)
        assert after is not None
        columns = projection(d_out, d_in, dtype=self.weight.dtype, device=CPU)
        found = predict({"weight": Watching(columns, self.weight.shape)}, values, keys, rounding=1.0)["weight"]
        micro = len(self.trail.accumulations)
        self.trail.accumulations.append(Accumulation(micro, before, after, found.columns, [found.size], coarse))
        return self.weight.grad

    @property
    def seen(self) -> tuple[Trail, Probe | None]:
        """The trail, and the gradient as a step sees it."""
        return self.trail, self.gauge.probe("weight", self.weight, self.trail.last, size="later")

    @property
    def resolution(self) -> Resolution:
        return resolve(*self.seen)


# Through a sample --------------------------------------------------------------------------------------------------


def test_only_large_gradients_are_followed_through_a_sample() -> None:
    for shape, expected in ((WIDE, True), (NARROW, False)):
        followed = Followed(shape)
        followed.accumulate()
        last = followed.trail.last
        assert last is not None
        assert (last.sample is not None) == expected == (last.columns is None)


def test_a_sample_is_always_of_the_same_elements() -> None:
    gradient = torch.randn(WIDE)
    assert math.prod(WIDE) >= LARGE
    assert sample(gradient).shape == (SAMPLED,)
    assert (sample(gradient) == sample(gradient.T.contiguous().T)).all()  # whatever their order in memory
    assert len(set(sample(torch.arange(LARGE)).tolist())) > SAMPLED / 2


def test_a_sample_that_tells_nothing_is_not_taken() -> None:
    """Of a gradient that is zero nearly everywhere, as an embedding's, no sample could tell a factor."""
    gradient = torch.zeros(WIDE)
    gradient[17] = 1.0
    assert (sample(gradient) != 0).sum() < TELLING
    assert sampled(gradient) is None
    assert sampled(torch.full(WIDE, 1e-30)) is None  # squares that are nearly nothing
    assert sampled(torch.ones(WIDE)) is not None
    assert sampled(torch.ones(WIDE).T) is None  # not in order, so that it would have to be copied


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_rounding_is_no_objection(dtype: torch.dtype, scale: float) -> None:
    for seed in range(20):
        followed = Followed(WIDE, dtype, seed)
        for rows in (1, 16, 3):
            followed.accumulate(rows=rows, scale=scale * 10.0 ** -random.Random(seed).randint(0, 3)).mul_(0.37)
        resolution = followed.resolution
        assert resolution.objection is None
        assert resolution.factors == pytest.approx({0: 0.37**3, 1: 0.37**2, 2: 0.37}, rel=1e-6)


@pytest.mark.parametrize("factor", [1.0, 0.37, -2.0])
def test_a_factor_is_as_near_as_the_dtype_allows(factor: float) -> None:
    followed = Followed(WIDE, torch.float64)
    followed.accumulate().mul_(factor)
    assert followed.resolution == Resolution({0: pytest.approx(factor, rel=1e-14)}, None)


def _element(gradient: Tensor) -> None:
    gradient[-1, 2] += 0.1 * gradient.norm() / math.sqrt(gradient.numel())


def _rows(gradient: Tensor) -> None:
    taken = sample(torch.arange(gradient.numel()).double()).astype(int)
    gradient.view(-1)[torch.tensor([i for i in range(5000) if i not in set(taken.tolist())])] *= 1.001


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "clipping by value": lambda gradient: gradient.clamp_(-1.0, 1.0),
    "one element": _element,
    "elements that are not in the sample": _rows,
    "centralisation": lambda gradient: gradient.sub_(gradient.mean(dim=1, keepdim=True)),
    "one row": lambda gradient: gradient[0].mul_(0.5),
    "one column": lambda gradient: gradient[:, 0].mul_(0.5),
    "all of the sample cleared": lambda gradient: gradient.view(-1).index_fill_(
        0, torch.from_numpy(sample(torch.arange(gradient.numel()).double())).long(), 0.0
    ),
    "permutation": lambda gradient: gradient.copy_(gradient.flip(0)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("later", [False, True])
def test_every_other_change_is_objected_to(dtype: torch.dtype, change: str, *, later: bool) -> None:
    """Also one that no sampled element shows, and one before a further accumulation."""
    for seed in range(10):
        followed = Followed(WIDE, dtype, seed)
        CHANGES[change](followed.accumulate())
        if later:
            followed.accumulate()
        assert followed.resolution.objection is not None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_no_pattern_explains_is_objected_to(dtype: torch.dtype) -> None:
    followed = Followed(WIDE, dtype)
    followed.accumulate(unseen=1e-3)
    objection = followed.resolution.objection
    assert objection is not None
    assert "patterns do not explain" in objection


@pytest.mark.parametrize("to_none", [True, False])
def test_cleared_gradients_have_factor_zero(*, to_none: bool) -> None:
    followed = Followed(WIDE)
    followed.accumulate(unseen=1.0)  # unexplained, and gone
    followed.weight.grad = None if to_none else torch.zeros(WIDE)
    assert followed.resolution == Resolution({0: 0.0}, None)
    followed.accumulate()
    assert followed.resolution == Resolution({0: 0.0, 1: 1.0}, None)


def test_a_gradient_may_change_from_what_a_sample_tells_to_what_it_does_not() -> None:
    """Each accumulation is followed in the way that its gradient allows."""
    followed = Followed(WIDE, torch.float64)
    followed.accumulate()
    followed.weight.grad = torch.zeros(WIDE, dtype=torch.float64)
    followed.accumulate(scale=1e-200)
    assert [event.after.sample is None for event in followed.trail.accumulations] == [False, True]
    followed.accumulate().mul_(0.5)
    assert followed.resolution == Resolution({0: 0.0, 1: pytest.approx(0.5), 2: pytest.approx(0.5)}, None)


def test_what_autocast_rounded_is_the_residual_at_the_step() -> None:
    followed = Followed(WIDE)
    followed.accumulate(coarse=True, unseen=1e-8)
    followed.trail.accumulations[0].sizes = [lambda: 1e6]
    gradient = followed.accumulate(coarse=True)
    noise = 1e-3 * torch.randn(WIDE)
    followed.trail.accumulations[1].predicted += noise @ projection(*WIDE, dtype=torch.float32, device=CPU)
    gradient.mul_(0.5)
    resolution = followed.resolution
    assert resolution.objection is None
    assert resolution.residual == pytest.approx(0.5 * float(noise.norm()), rel=0.2)


def test_a_gradient_that_is_not_finite_is_objected_to() -> None:
    for bad in (math.nan, math.inf):
        followed = Followed(WIDE)
        followed.accumulate()[3, 4] = bad
        assert followed.resolution.objection is not None
        followed = Followed(WIDE)
        followed.accumulate().mul_(bad)
        assert followed.resolution.objection == "its gradient is not finite"


# All at once -------------------------------------------------------------------------------------------------------

FATES: dict[str, Callable[[Followed], object]] = {
    "untouched": lambda followed: None,
    "scaled": lambda followed: followed.weight.grad.mul_(0.37),
    "cleared": lambda followed: followed.weight.grad.zero_(),
    "gone": lambda followed: setattr(followed.weight, "grad", None),
    "edited": lambda followed: _element(followed.weight.grad),
    "not finite": lambda followed: followed.weight.grad.mul_(math.nan),
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
        train(model, tmp_path / "run", lambda _: CHANGES[change](model.weight.grad.mul_(1e4)))


def test_a_regulariser_of_a_large_layer_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with pytest.raises(RefusedError, match="regulariser"):
        train(nn.Linear(300, 256), tmp_path / "run", lambda _: None, term=1e-3)
