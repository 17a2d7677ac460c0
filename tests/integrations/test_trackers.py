"""Numbers about a recording go to whatever the user watches a training with."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dualform
from dualform.integrations.trackers import as_trackers, track_end, track_step
from helpers.loops import batches, loss_of, mlp, sgd, train


class Writer:
    """As TensorBoard's SummaryWriter."""

    def __init__(self) -> None:
        self.told: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.told.append((name, value, step))


class Logger:
    """As a logger of Lightning, which has a `log` of another meaning too."""

    def __init__(self) -> None:
        self.told: list[tuple[dict[str, float], int]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.told.append((metrics, step))


class WandbRun:
    """As a run of W&B."""

    def __init__(self) -> None:
        self.told: list[tuple[dict[str, float], int]] = []

    def log(self, data: dict[str, float], step: int) -> None:
        self.told.append((data, step))


def record(path: Path, trackers: Any) -> nn.Module:
    model = mlp()
    optimizer = sgd(model)
    found = as_trackers(trackers)
    with dualform.record(model, optimizer, path) as recorder:
        for batch in batches(2):
            train(model, optimizer, [batch])
            track_step(found, recorder)
    track_end(found, path)
    return model


def test_each_kind_of_tracker_hears_of_steps_and_of_the_end(run: Path) -> None:
    writer, logger, wandb = Writer(), Logger(), WandbRun()
    told: list[tuple[int, Any]] = []
    model = record(run, [writer, logger, wandb, lambda step, numbers: told.append((step, numbers))])
    checked = dualform.open(run).verify(model)
    ratio = max((layer.error or 0) / (layer.bound or 1) for layer in checked.layers)
    assert [step for step, _ in told] == [1, 2, 2]
    size = 4 * 4 * (5 + 7 + 7 + 3)  # 4 patterns of float32 in each layer
    overheads = [numbers["dualform/overhead"] for _, numbers in told[:2]]
    assert all(seconds > 0 for seconds in overheads)
    assert [numbers for _, numbers in told[:2]] == [
        {"dualform/bytes": size, "dualform/overhead": overheads[0], "dualform/unexplained": 0.0},
        {"dualform/bytes": 2 * size, "dualform/overhead": overheads[1], "dualform/unexplained": 0.0},
    ]
    end = told[2][1]
    assert end["dualform/passed"] == 1
    assert end["dualform/error"] / end["dualform/error_bound"] == pytest.approx(ratio)
    assert end["dualform/bytes_on_disk"] == dualform.open(run).info().bytes
    assert wandb.told == logger.told == [(dict(numbers), step) for step, numbers in told]
    assert writer.told[:3] == [
        ("dualform/bytes", size, 1),
        ("dualform/overhead", overheads[0], 1),
        ("dualform/unexplained", 0.0, 1),
    ]


def test_what_autocast_leaves_unexplained_is_told(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        assert recorder.unexplained == 0
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model(batches(1)[0]))
        loss.backward()
        optimizer.step()
        residual = recorder.unexplained
    steps = dualform.open(run).steps()
    assert residual == pytest.approx(math.hypot(*filter(None, steps["residual"].to_pylist())))
    assert residual > 0


def test_without_trackers_nothing_is_verified(tmp_path: Path) -> None:
    assert as_trackers(None) == []
    track_end([], tmp_path / "no run")


def test_anything_else_is_refused() -> None:
    with pytest.raises(TypeError, match="trackers holds a int; expected a SummaryWriter"):
        as_trackers([3])
