"""SIGKILL at random moments: what the manifest lists is whole, and training goes on from a checkpoint."""

import multiprocessing
import multiprocessing.forkserver
import os
import random
import sys
import time
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import torch

import dualform
from dualform.errors import RunNotFoundError
from helpers.small import files, listed, network, sgd, state, train
from helpers.victim import STEPS, record_all

KILLS = 20


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServerContext]:
    """Processes that start at once, because what they import is there already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["helpers.victim"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the server itself does not take over ours
        multiprocessing.forkserver.ensure_running()
    yield context
    multiprocessing.forkserver._forkserver._stop()


@pytest.fixture(scope="module")
def checkpoints() -> list[dict[str, torch.Tensor]]:
    """The parameters after each number of steps, from a training without recording."""
    model = network()
    return [state(model), *train(model, sgd(model, momentum=0.0), range(STEPS))]


def run_for(server: ForkServerContext, path: Path, moment: float | None) -> float:
    """Record in another process and kill it after `moment` seconds, or let it finish; return how long it ran."""
    begin = time.monotonic() + 0.1
    process = server.Process(target=record_all, args=(path, begin))
    process.start()
    if moment is not None:
        time.sleep(max(0.0, begin + moment - time.monotonic()))
        process.kill()  # SIGKILL
    process.join()
    assert process.exitcode in ((0,) if moment is None else (0, -9))
    return time.monotonic() - begin


@pytest.mark.slow
def test_killed_at_twenty_random_moments(
    server: ForkServerContext, checkpoints: list[dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    whole = min(run_for(server, tmp_path / f"whole{i}", None) for i in range(3))
    assert dualform.open(tmp_path / "whole0").verify(checkpoints[STEPS]).passed
    chance = random.Random(2022)
    seen: list[int | None] = []
    for kill in range(KILLS):
        path = tmp_path / f"run{kill}"
        # The moments are spread over the whole recording; each falls anywhere within its share of it.
        run_for(server, path, (kill + chance.random()) / KILLS * whole)
        seen.append(examine(path, checkpoints, chance))
    assert len(set(seen)) > KILLS // 5, f"the kills fell on too few different steps to tell: {seen}"


def examine(path: Path, checkpoints: list[dict[str, torch.Tensor]], chance: random.Random) -> int | None:
    """Open what a killed recording left, verify it, resume it and finish it.

    Return the last published step; nothing where the process was killed before the first manifest.
    """
    published: int | None = None
    try:
        memory = dualform.open(path)
    except RunNotFoundError:
        pass
    else:
        published = memory.step
        assert memory.verify(checkpoints[published]).passed
        assert memory.patterns("0").num_rows == 6 * published
        assert set(memory._run.files()) <= files(path)
    # The user's checkpoint is the last published step, or one some steps before it.
    step = published or 0
    if chance.random() < 0.5:
        step = chance.randint(0, step)
    model = network()
    model.load_state_dict(checkpoints[step])
    optimizer = sgd(model, momentum=0.0)
    with dualform.record(model, optimizer, path, shard_bytes=10_000, resume=True) as recorder:
        assert recorder.step == step
        train(model, optimizer, range(step, STEPS), recorder)
    memory = dualform.open(path)
    assert memory.step == STEPS
    assert memory.verify(checkpoints[STEPS]).passed
    assert memory.at(step=step).verify(checkpoints[step]).passed
    assert files(path) == listed(path), "nothing temporary and nothing unlisted is left"
    return published
