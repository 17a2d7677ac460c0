"""Processes that train together give the plain answers, each to its own questions, the same to the bit as one alone."""

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

from conformance.executors import VIEWS, ExecutorConformance, executed_run, folded_run, folds_of, jobs_of
from dualform.attend.groups import Table
from dualform.engine.distributed import DistributedExecutor
from dualform.engine.jobs import Executor
from dualform.engine.plain import PlainExecutor
from dualform.errors import QueryError
from dualform.store.reader import Run
from helpers.bits import bits

__all__ = ["executed_run", "folded_run"]  # fixtures


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
class TestDistributedExecutor(ExecutorConformance):
    @pytest.fixture
    def make(self) -> Callable[[], Executor]:
        return DistributedExecutor


def questions(run: Run, folded: Run, rank: int) -> list[tuple[Run, list[Any]]]:
    """Return what a process asks: queries, a view and groups of its own."""
    table = Table(run, *VIEWS[("masked", "whole", "early")[rank % 3]], PlainExecutor())
    queries = torch.randn(3 + rank, 40, generator=torch.Generator().manual_seed(rank))
    jobs: list[Any] = list(jobs_of(run, table, "0", queries).values())
    return [(run, jobs), (folded, list(folds_of(folded, Table(folded, (), 9 - rank, PlainExecutor())).values()))]


def ask(run: Run, folded: Run, rank: int) -> list[Any]:
    executor = DistributedExecutor()
    return [executor.run(source, jobs) for source, jobs in questions(run, folded, rank)]


def test_two_processes_answer_as_one(executed_run: Run, folded_run: Run, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()

    def work(rank: int) -> None:
        group = f"file://{tmp_path}/two"
        torch.distributed.init_process_group("gloo", init_method=group, rank=rank, world_size=2)
        answers.put((rank, bits(ask(executed_run, folded_run, rank))))
        torch.distributed.destroy_process_group()

    processes = [context.Process(target=work, args=(rank,)) for rank in range(2)]
    for process in processes:
        process.start()
    found = dict(answers.get() for _ in processes)
    for process in processes:
        process.join(30)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    try:
        for rank in range(2):
            assert found[rank] == bits(ask(executed_run, folded_run, rank))
    finally:
        torch.distributed.destroy_process_group()


def test_without_a_process_group_it_says_what_to_do(executed_run: Run) -> None:
    with pytest.raises(QueryError, match="init_process_group first"):
        DistributedExecutor().run(executed_run, [])
