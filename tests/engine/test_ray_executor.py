"""Ray's workers give the plain answers, the same to the bit for any number of them, also when one is killed."""

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from conformance.executors import (
    VIEWS,
    ExecutorConformance,
    assert_same,
    executed_run,
    folded_run,
    folds_of,
    jobs_of,
)
from dualform.attend.groups import Table
from dualform.engine.jobs import Executor
from dualform.engine.plain import PlainExecutor
from dualform.engine.ray_executor import RayExecutor
from dualform.store.reader import Run

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'dualform[ray]'")
__all__ = ["executed_run", "folded_run"]  # fixtures


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Start one Ray for the file, with as many processors as the executors of its tests have workers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(num_cpus=8, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def executors() -> Iterator[dict[int, RayExecutor]]:
    """Executors of one and two workers."""
    found = {count: RayExecutor(count) for count in (1, 2)}
    yield found
    for executor in found.values():
        executor.close()


class TestRayExecutor(ExecutorConformance):
    @pytest.fixture
    def make(self, executors: dict[int, RayExecutor]) -> Callable[[], Executor]:
        return lambda: executors[2]


def questions(run: Run, view: str) -> list[Any]:
    table = Table(run, *VIEWS[view], PlainExecutor())
    queries = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    return list(jobs_of(run, table, "0", queries).values())


def equal(one: Any, other: Any) -> None:
    """Compare two results to the bit."""
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("view", VIEWS)
def test_answers_are_the_same_to_the_bit_for_any_number_of_workers(
    view: str, executors: dict[int, RayExecutor], executed_run: Run
) -> None:
    jobs = questions(executed_run, view)
    one, two = (executors[count].run(executed_run, jobs) for count in (1, 2))
    for first, second in zip(one, two, strict=True):
        equal(first, second)


def test_folds_are_the_same_to_the_bit(executors: dict[int, RayExecutor], folded_run: Run) -> None:
    folds = list(folds_of(folded_run, Table(folded_run, (), 9, PlainExecutor())).values())
    one, two = (executors[count].run(folded_run, folds) for count in (1, 2))
    for first, second, plain in zip(one, two, PlainExecutor().run(folded_run, folds), strict=True):
        assert_same(first, second)
        assert_same(first, plain)


def test_the_parts_of_a_worker_that_is_killed_are_done_again(
    executors: dict[int, RayExecutor], executed_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = questions(executed_run, "whole")
    executor = executors[2]
    expected = executors[1].run(executed_run, jobs)
    executor.run(executed_run, jobs[:1])
    before = executor.process_ids
    submit, killed = executor._submit, []

    def submit_and_kill(task: Any) -> Any:
        found = submit(task)
        if not killed:
            killed.append(before[task.worker])
            os.kill(before[task.worker], signal.SIGKILL)
        return found

    monkeypatch.setattr(executor, "_submit", submit_and_kill)
    for first, second in zip(executor.run(executed_run, jobs), expected, strict=True):
        equal(first, second)
    assert killed[0] not in executor.process_ids
