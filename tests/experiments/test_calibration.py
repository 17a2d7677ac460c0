"""Calibration of a run's effects by retrainings of its own training function."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from dualform import cli
from dualform.attend.answers import Effects
from dualform.errors import QueryError, ReplayError
from dualform.experiments.calibration import calibrate_effects, compare_with_retrainings, score_of, slope_of
from dualform.opening import retraining_of

SAMPLES, TESTS = 40, 12


def data(count: int, seed: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return inputs, inputs[:, :3].argmax(dim=1)


def train(recording: Callable[..., Any], keep: Tensor | None = None) -> nn.Module:
    """A small training that leaves out what it is told to."""
    inputs, labels = data(SAMPLES, 1)
    samples = torch.arange(SAMPLES) if keep is None else keep
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    with recording(model, optimizer) as recorder:
        recorder.tests(*data(TESTS, 2))
        for _ in range(12):
            for batch in samples[torch.randperm(len(samples))].split(10):
                recorder.annotate(sample=batch)
                optimizer.zero_grad()
                functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
                optimizer.step()
        recorder.flush()
    return model


def disobeys(recording: Callable[..., Any], keep: Tensor | None = None) -> nn.Module:
    return train(recording)


def names_nothing(recording: Callable[..., Any], keep: Tensor | None = None) -> nn.Module:
    return train(lambda *a: _Deaf(recording(*a)), keep)


def returns_nothing(recording: Callable[..., Any], keep: Tensor | None = None) -> None:
    train(recording, keep)


def takes_no_subset(recording: Callable[..., Any]) -> nn.Module:
    return train(recording)


class _Deaf:
    """A recorder that no annotation reaches."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder

    def __enter__(self) -> Any:
        self._recorder.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._recorder.__exit__(*error)

    def annotate(self, **columns: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recorder, name)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    dualform.record_training(train, tmp_path / "run", keep=dualform.Patterns())
    return tmp_path / "run"


def test_effects_are_compared_with_retrainings_on_halves(run: Path) -> None:
    kept: list[list[int]] = []
    again = retraining_of(run, train)

    def retrain(keep: Any) -> nn.Module:
        kept.append(list(keep))
        return again(keep)

    memory = dualform.open(run)
    found = calibrate_effects(memory, retrain, retrainings=8)
    assert all(len(set(half)) == SAMPLES // 2 for half in kept)
    assert len({tuple(half) for half in kept}) == 8
    assert (found.retrainings, found.tests, found.samples) == (8, TESTS, SAMPLES)
    model = again(range(SAMPLES))
    inputs, labels = data(TESTS, 2)
    values = memory.attend(memory.trained(model), inputs, targets=labels).effects().values
    members = torch.zeros(8, SAMPLES, dtype=torch.float64)
    for row, half in zip(members, kept, strict=True):
        row[half] = 1
    actual = []
    for half in kept:
        logits = again(half)(inputs).detach()
        others = logits.scatter(1, labels[:, None], -torch.inf).logsumexp(dim=1)
        actual.append(logits.gather(1, labels[:, None])[:, 0] - others)
    margins = torch.stack(actual).double()
    assert found.lds[0] == pytest.approx(score_of(members @ values.T, margins), abs=0.01)
    assert found.slope[0] == pytest.approx(slope_of(members @ values.T, margins))
    assert found.lds[0] > 0.2 > abs(found.shuffled) - 0.3
    assert any("48 steps" in reason for reason in found.cautions)


def test_a_retraining_on_all_samples_is_the_recorded_one(run: Path) -> None:
    state = torch.random.get_rng_state()
    model = retraining_of(run, train)(range(SAMPLES))
    assert torch.equal(torch.random.get_rng_state(), state)
    recorded = dualform.open(run).trained(model)
    for mine, theirs in zip(model.parameters(), recorded.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_slope_and_score_of_known_predictions() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(5, 30, generator=generator, dtype=torch.float64)
    members = (torch.rand(12, 30, generator=generator) < 0.5).double()
    effects = Effects(("0",), "margin", ("sample",), tuple(range(30)), values, {})
    found = compare_with_retrainings(effects, members, 3 + 0.25 * members @ values.T)
    assert list(found.slope) == pytest.approx([0.25, 0.0], abs=1e-6)
    assert found.lds[0] == pytest.approx(1.0)
    assert found.cautions == (
        "sums of effects over half the data are about 4.0 times too large: groups that large are far from additive; "
        "trust their order, not their size",
    )
    noise = torch.randn(12, 5, generator=generator, dtype=torch.float64)
    assert "hardly predicted" in compare_with_retrainings(effects, members, noise).cautions[0]
    assert compare_with_retrainings(effects, members, members @ values.T + 0.1 * noise).cautions == ()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (disobeys, "which it was told to leave out"),
        (names_nothing, "has annotated no samples"),
        (returns_nothing, "returned NoneType; expected the trained model"),
        (takes_no_subset, "cannot be told to leave samples out; expected a function train"),
    ],
)
def test_a_training_that_does_not_leave_out_is_refused(run: Path, function: Any, message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        retraining_of(run, function)([1, 2, 3])


def test_what_cannot_be_calibrated_is_refused(run: Path) -> None:
    again = retraining_of(run, train)
    with pytest.raises(QueryError, match="at least 4"):
        calibrate_effects(dualform.open(run), again, retrainings=3)
    with pytest.raises(QueryError, match="keeps no targets"):
        calibrate_effects(dualform.open(run), again, inputs=data(3, 1)[0])


def test_the_command_calibrates_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = f"{__name__}:train"
    cli.app(["evaluate", str(run), "--retrain", "4", "--train", named, "--json"], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    assert found["retrainings"] == 4
    assert -1 <= found["lds"] <= 1
    cli.app(["evaluate", str(run), "--retrain", "4", "--train", named], standalone_mode=False)
    assert "slope" in capsys.readouterr().out
    with pytest.raises(QueryError, match="is no TOML file"):
        cli.app(["evaluate", str(run)], standalone_mode=False)
