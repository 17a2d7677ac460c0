"""The executor over Ray: workers on the machines of a cluster, or some on this one, each with parts of its own.

A part is always given to the same worker, which keeps its keys in memory between questions. Questions travel as data
and states of parts come back; `part_states.py` cuts and merges them, so that answers do not depend on the number of
workers. The parts of a worker that dies are done again by another one. Folds and sweeps run whole, parameters side by
side.

A Ray of this machine takes 4 to 8 seconds to start and 0.9 GB of memory: it pays for runs that one machine reads too
slowly. Ray is installed with the package extra `ray`.
"""

import functools
import os
import pickle
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dualform.engine.jobs import Fold, Job, Sweep
from dualform.engine.part_states import (
    HeldKeys,
    Piece,
    folds_by_parameter,
    folds_joined,
    merged,
    part_states,
    pieces_of,
    receive_job,
    require_cpu,
    run_onlookers_here,
    run_whole,
    send_job,
    send_source,
    without_codes,
)
from dualform.engine.source import PatternSource
from dualform.errors import DualformError, QueryError

MAX_ATTEMPTS = 4  # at one task whose workers die
HELD_SHARE = 0.4  # of a machine's memory that the workers' keys may take
MAX_OPEN_SOURCES = 8  # that a worker keeps open
MAX_REMEMBERED_VIEWS = 8  # views whose masks a worker remembers
WORKER_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""Blocks are made and freed all the time: glibc keeps their memory instead of giving it back, which halves the time."""
OBJECT_STORE_BYTES = 256 << 20  # of a Ray that is started here: questions and states are small


class RayExecutor:
    """Runs jobs on Ray's workers.

    Args:
        workers: how many; by default one for each processor of the cluster.
        address: of the cluster; by default the one that `RAY_ADDRESS` names or that runs on this machine, and where
            there is none a Ray is started here.
        held_bytes: how many bytes of keys each worker may keep in memory.
    """

    def __init__(
        self, workers: int | None = None, *, address: str | None = None, held_bytes: int | None = None
    ) -> None:
        self._count = workers
        self._address = address
        self._held_bytes = held_bytes
        self._lock = threading.Lock()  # of the workers and sources; several threads may ask
        self._workers: list[Any] = []
        self._opened: dict[str, Any] = {}  # sources that workers can open, by digest, in Ray's memory

    def run(self, source: PatternSource, jobs: Sequence[Job]) -> list[Any]:
        """Return the result of each job."""
        return run_onlookers_here(self._run, source, jobs)

    def _run(self, source: PatternSource, jobs: Sequence[Job]) -> list[Any]:
        """Return the result of each job, by the workers."""
        require_cpu(jobs)
        if not jobs:
            return []
        opened = self._open(source)
        tasks: list[_Task] = []
        for place, job in enumerate(jobs):
            if isinstance(job, Sweep):
                tasks.append(_Task(opened, place % len(self._workers), place, _put(source, [job])))
            elif not isinstance(job, Fold):
                tasks += self._pass_tasks(source, opened, place, job)
        folds = folds_by_parameter(jobs)
        for number, (name, mine) in enumerate(folds.items()):
            tasks.append(_Task(opened, number % len(self._workers), name, _put(source, mine)))
        found = self._done(tasks)
        folded = folds_joined(jobs, {name: found[name][0] for name in folds})
        results = []
        for place, job in enumerate(jobs):
            if isinstance(job, Fold):
                results.append(next(folded))
            elif isinstance(job, Sweep):
                results.append(found[place][0][0])
            else:
                states = [state for piece in found.get(place, ()) for state in piece]
                results.append(merged(job, dict(states)))
        return results

    def close(self) -> None:
        """End the workers; a Ray that was started here goes on for other executors of this process."""
        import ray

        for worker in self._workers:
            ray.kill(worker)
        self._workers, self._opened = [], {}

    @property
    def process_ids(self) -> list[int]:
        """The process ids of the workers."""
        import ray

        found: list[int] = ray.get([worker.process_id.remote() for worker in self._workers])
        return found

    def processor_seconds(self) -> list[float]:
        """Return the processor time that each worker has used since it started."""
        import ray

        found: list[float] = ray.get([worker.processor_seconds.remote() for worker in self._workers])
        return found

    def _pass_tasks(self, source: PatternSource, opened: Any, place: int, job: Any) -> list["_Task"]:
        """Return the tasks of a pass, one for each worker that has parts of it."""
        order = {part.index: number for number, part in enumerate(source.parts())}
        mine: dict[int, list[Piece]] = {}
        for piece in pieces_of(source, job):
            mine.setdefault(order[piece.index] % len(self._workers), []).append(piece)
        if not mine:
            return []
        content = _put(source, [without_codes(job)])
        return [_Task(opened, worker, place, content, tuple(pieces)) for worker, pieces in mine.items()]

    def _open(self, source: PatternSource) -> tuple[str, Any]:
        """Start the workers, if there are none; return a source's digest, and how they open it, in Ray's memory."""
        ray = _connected(self._address, self._count)
        with self._lock:
            if not self._workers:
                there = int(ray.cluster_resources().get("CPU", 0))
                if self._count is not None and self._count > there:
                    raise QueryError(f"{self._count} workers were asked for, but Ray has {there} processors.")
                count = self._count or max(1, int(ray.available_resources().get("CPU", 0)))
                self._workers = [self._worker() for _ in range(count)]
            if source.digest not in self._opened:
                self._opened[source.digest] = ray.put(send_source(source))
            return source.digest, self._opened[source.digest]

    def _worker(self) -> Any:
        import ray

        share = int(HELD_SHARE * _memory_bytes() / max(1, self._count or os.cpu_count() or 1))
        options = {"num_cpus": 1, "max_restarts": 0, "runtime_env": {"env_vars": WORKER_ENVIRONMENT}}
        return ray.remote(**options)(RayWorker).remote(self._held_bytes or share)

    def _done(self, tasks: Sequence["_Task"]) -> dict[Any, list[Any]]:
        """Return the results of tasks by their place, in the order of tasks; those of dead workers are done again."""
        import ray

        results: dict[int, Any] = {}
        waiting = {self._submit(task): number for number, task in enumerate(tasks)}
        attempts = dict.fromkeys(range(len(tasks)), 1)
        while waiting:
            (ready, *_), _ = ray.wait(list(waiting), num_returns=1)
            number = waiting.pop(ready)
            try:
                found = ray.get(ready)
            except ray.exceptions.RayActorError as error:
                attempts[number] += 1
                if attempts[number] > MAX_ATTEMPTS:
                    raise QueryError(
                        f"A part of this question was given to {MAX_ATTEMPTS} workers, and all of them died. They may "
                        "lack memory: use fewer workers on a machine, or smaller held_bytes."
                    ) from error
                self._replace(tasks[number].worker, error)
                waiting[self._submit(tasks[number])] = number
                continue
            if isinstance(found, DualformError):
                raise found
            results[number] = found
        by_place: dict[Any, list[Any]] = {}
        for number, task in enumerate(tasks):
            by_place.setdefault(task.place, []).append(results[number])
        return by_place

    def _submit(self, task: "_Task") -> Any:
        return self._workers[task.worker].answer.remote(*task.opened, task.jobs, task.pieces)

    def _replace(self, number: int, error: Any) -> None:
        """Start a new worker where one died, unless another task has noticed it before."""
        import ray

        with self._lock:
            if error.actor_id in (None, self._workers[number]._actor_id.hex()):
                ray.kill(self._workers[number])
                self._workers[number] = self._worker()


@functools.cache
def shared_executor() -> RayExecutor:
    """Return the executor that every memory of this process has that was opened with `executor="ray"`."""
    return RayExecutor()


@dataclass(frozen=True, slots=True)
class _Task:
    """Something for one worker: jobs, and the pieces of them that are its own."""

    opened: tuple[str, Any]  # the source's digest, and how to open it
    worker: int
    place: Any  # of the job among all jobs, or the name of a parameter
    jobs: Any
    pieces: tuple[Piece, ...] | None = None


class RayWorker:
    """What runs in a worker's process: open sources, and keys of its parts."""

    def __init__(self, held_bytes: int) -> None:
        torch.set_num_threads(1)  # sums of several threads would depend on their number
        self._sources: dict[str, PatternSource] = {}
        self._held = HeldKeys(held_bytes)
        self._views: dict[Any, Any] = {}

    def process_id(self) -> int:
        """Return the worker's process id."""
        return os.getpid()

    def processor_seconds(self) -> float:
        """Return the processor time that the worker has used."""
        return time.process_time()

    def answer(self, digest: str, opening: bytes, jobs: list[bytes], pieces: tuple[Piece, ...] | None) -> Any:
        """Return the states of pieces of one pass, or the results of whole jobs; our own errors are returned too."""
        try:
            source = self._source(digest, opening)
            received = [receive_job(source, job) for job in jobs]
            if pieces is None:
                return run_whole(source, received)
            (job,) = received
            view = self._views.setdefault((digest, job.view.key), job.view)  # whose masks are known
            while len(self._views) > MAX_REMEMBERED_VIEWS:
                del self._views[next(iter(self._views))]
            return list(part_states(source, replace(job, view=view), pieces, self._held))
        except DualformError as error:
            return error

    def _source(self, digest: str, opening: bytes) -> PatternSource:
        if digest not in self._sources:
            self._sources[digest] = pickle.loads(opening)
            while len(self._sources) > MAX_OPEN_SOURCES:
                self._held.forget(oldest := next(iter(self._sources)))
                del self._sources[oldest]
        return self._sources[digest]


def _put(source: PatternSource, jobs: Sequence[Job]) -> Any:
    """Put jobs into Ray's memory."""
    import ray

    return ray.put([send_job(source, job) for job in jobs])


def _connected(address: str | None, workers: int | None) -> Any:
    """Return Ray, connected to a cluster or to one that is started on this machine."""
    try:
        import ray
    except ImportError as error:
        raise QueryError("""executor="ray" needs the package ray: pip install 'dualform[ray]'.""") from error
    if ray.is_initialized():
        return ray
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        ray.init(address=address or "auto", **quiet)
    except ConnectionError as error:
        if address is not None or os.environ.get("RAY_ADDRESS"):
            raise QueryError(
                f"There is no Ray at {address or 'the address in RAY_ADDRESS'}. Start it first."
            ) from error
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            num_cpus=max(workers or 1, os.cpu_count() or 1),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            **quiet,
        )
    return ray


def _memory_bytes() -> int:
    """Return the memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
