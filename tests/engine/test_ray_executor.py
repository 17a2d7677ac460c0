"""Ray's workers give the plain answers, the same to the bit for any number of them, also when one is killed."""

import copy
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dualform
from conformance.executors import (
    VIEWS,
    ExecutorConformance,
    assert_same,
    executed_run,
    folded_run,
    folds_of,
    jobs_of,
)
from dualform import cli
from dualform.attend.groups import Table
from dualform.engine import ray_executor
from dualform.engine.jobs import Executor
from dualform.engine.plain import PlainExecutor
from dualform.engine.ray_executor import RayExecutor
from dualform.errors import CorruptError, QueryError
from dualform.opening import copy_run
from dualform.store.memory_blobs import MemoryBlobs
from dualform.store.reader import Run
from helpers.bits import bits
from helpers.object_storage import ObjectStorage, Task, can_serve, serving

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'dualform[ray]'")
__all__ = ["executed_run", "folded_run"]  # fixtures
SERVERS: list[ObjectStorage] = []  # the S3 server of this file's tests


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Start one Ray for the file, that finds an S3 server by its environment."""
    if can_serve():
        with serving() as server:
            SERVERS.append(server)
            yield from started()
    else:
        yield from started()


def started() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(num_cpus=3, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
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


@pytest.mark.parametrize("view", VIEWS)
def test_answers_are_the_same_to_the_bit_for_any_number_of_workers(
    view: str, executors: dict[int, RayExecutor], executed_run: Run
) -> None:
    jobs = questions(executed_run, view)
    one, two = (executors[count].run(executed_run, jobs) for count in (1, 2))
    assert bits(one) == bits(two)


def test_folds_are_the_same_to_the_bit(executors: dict[int, RayExecutor], folded_run: Run) -> None:
    folds = list(folds_of(folded_run, Table(folded_run, (), 9, PlainExecutor())).values())
    one, two = (executors[count].run(folded_run, folds) for count in (1, 2))
    for first, second, plain in zip(one, two, PlainExecutor().run(folded_run, folds), strict=True):
        assert bits(first) == bits(second)
        assert_same(first, plain)


def test_the_parts_of_a_worker_that_is_killed_are_done_again(
    executors: dict[int, RayExecutor], executed_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = questions(executed_run, "whole")
    executor = executors[2]
    expected = executors[1].run(executed_run, jobs)
    executor.run(executed_run, jobs[:1])
    before = executor.process_ids
    submit = executor._submit
    killed: list[int] = []

    def submit_and_kill(task: Any) -> Any:
        found = submit(task)
        if not killed:
            killed.append(before[task.worker])
            os.kill(before[task.worker], signal.SIGKILL)
        return found

    monkeypatch.setattr(executor, "_submit", submit_and_kill)
    assert bits(executor.run(executed_run, jobs)) == bits(expected)
    assert killed[0] not in executor.process_ids


def made() -> torch.nn.Module:
    """Make the model of the task, as the run remembers it."""
    return Task().model


def asked(memory: dualform.Memory, model: torch.nn.Module) -> dict[str, Any]:
    """Ask the questions of the README."""
    inputs = torch.randn(4, 24, generator=torch.Generator().manual_seed(3))
    spotlight = memory.attend(model, inputs, targets=torch.tensor([0, 1, 2, 3]), quantity="margin")
    layer = spotlight[""]
    totals, best = spotlight.compute(dualform.Totals(by="label"), dualform.Top(5))
    view = memory.without(label=1).at(step=5)
    assert memory.verify(model).passed
    return {
        "output": layer.output(),
        "attention": layer.attention(),
        "totals": totals[""].values,
        "best": best[""].values,
        "contributions": layer.top(3, of="contribution").values,
        "bins": layer.totals(by=["label", dualform.bins("step", width=2)], of="magnitude").values,
        "per label": layer.top(2, by="label").values,
        "effects": spotlight.effects(by="label").values,
        "weights": memory.weights()["weight"],
        "masked": view.apply(copy.deepcopy(model)).get_parameter("weight").detach(),
        "patterns": float(view.patterns("").num_rows),
    }


COMMANDS = (
    ["verify"],
    ["attend", "--by", "label"],
    ["attend", "--by", "label,step:2", "--of", "magnitude", "--top", "3"],
    ["attend", "--by", "label", "--of", "contribution", "--where", "label < 3", "--at", "5"],
    ["attend", "--by", "label", "--of", "effect"],
    ["attend", "--by", "label", "--of", "path", "--test", "0"],
    ["mask", "--without", "label = 1"],
)
"""What the README asks on the command line, with other options of the same questions."""


@pytest.mark.skipif(not can_serve(), reason="needs an S3 server: pip install 'dualform[cloud]' 'moto[server]'")
def test_the_questions_of_the_readme_over_object_storage_and_ray(
    executors: dict[int, RayExecutor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    task, address = Task(), SERVERS[0].address()
    monkeypatch.setenv("DUALFORM_CACHE", str(tmp_path))
    options: dict[str, Any] = {"shard_bytes": 4000, "factory": f"{__name__}:made"}
    with dualform.record(task.model, task.optimizer, address, **options) as recorder:
        task.train(recorder, range(8))
    copy_run(address, tmp_path / "run")
    local = dualform.open(tmp_path / "run")
    local.add_tests(torch.randn(5, 24), torch.arange(5) % 4)
    dualform.open(address).add_tests(*local.tests())
    there = asked(dualform.open(address, executor=executors[2]), task.model)
    assert_same(there, asked(local, task.model))
    monkeypatch.setattr(ray_executor, "shared_executor", lambda: executors[2])
    for command, *given in COMMANDS:
        pages = []
        for place, executor in ((address, "ray"), (str(tmp_path / "run"), "local")):
            arguments = [command, place, "--executor", executor, "--json", "--trust", *given]
            monkeypatch.setattr(sys, "argv", ["dualform", *arguments])
            with pytest.raises(SystemExit) as stop:
                cli.main()
            assert not stop.value.code, capsys.readouterr().err
            pages.append(json.loads(capsys.readouterr().out))
        assert_close(*pages)


def assert_close(one: Any, other: Any) -> None:
    """Compare two pages of JSON; numbers by their size."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_close(one[name], other[name])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for first, second in zip(one, other, strict=True):
            assert_close(first, second)
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
    else:
        assert one == other


def test_what_cannot_be_asked_of_workers_is_said(executors: dict[int, RayExecutor], tmp_path: Path) -> None:
    task, blobs = Task(), MemoryBlobs()
    for place in (blobs, tmp_path / "run"):
        task = Task()
        with dualform.record(task.model, task.optimizer, place, shard_bytes=4000) as recorder:
            task.train(recorder, range(4))
    inputs = torch.randn(2, 24)
    with pytest.raises(QueryError, match="cannot be opened by other processes"):
        dualform.open(blobs, executor=executors[2]).attend(task.model, inputs)[""].attention()
    with pytest.raises(QueryError, match="9 workers were asked for, but Ray has 3"):
        dualform.open(tmp_path / "run", executor=RayExecutor(9)).attend(task.model, inputs)[""].attention()
    with pytest.raises(QueryError, match=r"no executor 'spark'. There are: local, ray, distributed"):
        dualform.open(tmp_path / "run", executor="spark")
    memory = dualform.open(tmp_path / "run", executor=executors[2])
    path = tmp_path / "run" / "shards" / "000001.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CorruptError, match=r"cut short|cannot be read"):
        memory.attend(task.model, inputs)[""].attention()
