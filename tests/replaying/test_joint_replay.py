"""Two processes that recorded the steps of their training run it again together, and answer as stored patterns do."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dualform
from dualform.replaying.training import Recording, Train, record_training
from dualform.store.reader import Run
from helpers.joint_trainings import Tied, adamw, batches, sgd, train_jointly
from helpers.loops import WITHIN, mlp
from helpers.together import run_together

STEPS = 5
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], torch.optim.Optimizer], dict[str, Any]]] = {
    "plain": (mlp, sgd, {}),
    "accumulated": (mlp, adamw, {"micros": 2, "no_sync": True, "clip": True}),
    "reduced each time": (mlp, sgd, {"micros": 2}),
    "tied": (Tied, adamw, {"clip": True}),
    "divided": (mlp, sgd, {"wrap": "rows"}),
    "divided, accumulated": (mlp, adamw, {"wrap": "rows", "micros": 2, "no_sync": True, "clip": True}),
    "divided, tied": (Tied, adamw, {"wrap": "rows", "clip": True}),
}


def make_training(name: str, rank: int | None, **broken: Any) -> Train:
    """Return the training function of a case in one of its processes, or of all rows in one process."""
    make, make_optimizer, options = CASES[name]

    def train(recording: Recording) -> None:
        train_jointly(recording, make(), make_optimizer, rank, steps=STEPS, **{**options, **broken})

    return train


def answers(memory: dualform.Memory, name: str) -> dict[str, Any]:
    """Ask a memory, and return what it says."""
    make = CASES[name][0]
    model = memory.trained(make())
    inputs = next(batches(make(), 1, 1, None))[0][0][:2]
    spotlight = memory.attend(model, inputs)
    layer = next(iter(memory.layers))
    best = spotlight[layer].top(5)
    report = memory.verify()
    return {
        "passed": report.passed,
        "error": max(one.error or 0.0 for one in report.layers),
        "shares": {name: one.shares for name, one in memory.shares("label").items()},
        "totals": {name: spotlight[name].totals("label").values for name in memory.layers},
        "contributions": {name: spotlight[name].totals("label", of="contribution").values for name in memory.layers},
        "best": best.values,
    }


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A folder with runs of steps and of patterns by two processes, and what each process was told of every case."""
    folder = tmp_path_factory.mktemp("told")

    def work(rank: int) -> None:
        found: dict[str, Any] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, for tiny models
            for name in CASES:
                train = make_training(name, rank)
                record_training(train, folder / name)
                record_training(train, folder / f"{name}, patterns", keep=dualform.Patterns())
                memory = dualform.open(folder / name, train=train)
                found[name] = answers(memory, name), answers(dualform.open(folder / f"{name}, patterns"), name)
        torch.save(found, folder / f"told{rank}")

    run_together(folder, work)
    return folder, [torch.load(folder / f"told{rank}") for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_steps_answer_as_patterns_do(name: str, told: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, found = told
    run = Run(folder / name)
    assert (run.steps, run.description.processes, run.description.closed) == (STEPS, 2, True)
    assert {layer.store for layer in run.layers.values()} == {"steps"}
    for steps, patterns in [each[name] for each in found]:
        assert steps.pop("passed")
        assert patterns.pop("passed")
        assert steps["error"] < WITHIN[torch.float32]
        torch.testing.assert_close(steps, patterns, rtol=0, atol=0)
