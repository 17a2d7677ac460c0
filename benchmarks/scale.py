"""Past one machine, by simulation: what a question over 10^9 patterns costs on 1 to 64 machines with object storage.

    python -m benchmarks.scale            measure the parts of a question here, check the model, print the table

The costs of one part (read, product, merge, ship) are measured on this machine, with one core, in seconds of its
processor, so that others who use the machine do not count. The model puts them together for a cluster whose rates are
stated, not measured. It is compared with real questions on one and two workers of a local Ray: the processor seconds
of the busiest worker and of the process that asks. docs/scale.md explains the model and keeps a table.
"""

import argparse
import ctypes
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dualform
from dualform.engine.jobs import Pass, WholeView
from dualform.engine.measures import PatternMeasure
from dualform.engine.part_states import HeldKeys, merged, part_states, pieces_of, send_job
from dualform.engine.ray_executor import RayExecutor
from dualform.engine.reducers import Best
from dualform.engine.source import PatternSource
from dualform.store.reader import Run

WIDTH = 768
QUERIES = 16
BEST = 100
KEY_BYTES = 2 * WIDTH + 4  # float16, and a scale
PATTERNS = 10**9
SHARD_BYTES = 128 << 20
HELD_SHARE = 0.4  # of a machine's memory that keys may stay in, as in the Ray executor


@dataclass(frozen=True, slots=True)
class Costs:
    """What the pieces of a question cost on this machine, in seconds, with one core.

    Attributes:
        read: per byte of keys that are read from a file in the page cache.
        product: per pattern that is measured against all queries and reduced.
        part: per part, however small.
        merge: per part, for taking its state in and merging it, by the one process that asks.
        ship: per question and worker, to send it and to hear of its end.
        state_bytes: bytes of the state of one part.
    """

    read: float
    product: float
    part: float
    merge: float
    ship: float
    state_bytes: int


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines, and what is assumed of them.

    Attributes:
        machines: how many.
        cores: of each, a worker on every one.
        memory: bytes of each.
        storage_rate: bytes per second that a machine reads from object storage.
        latency: seconds until a request to object storage is answered.
        network_rate: bytes per second into the process that asks.
    """

    machines: int
    cores: int = 16
    memory: float = 128e9
    storage_rate: float = 1.25e9
    latency: float = 0.03
    network_rate: float = 1.25e9


@dataclass(frozen=True, slots=True)
class Outcome:
    """The simulated cost of a question: seconds of the first one and of each further one, and where they go."""

    first: float
    steady: float
    held: float  # share of the keys that stay in memory
    reading: float  # seconds of the first question, by what takes them
    computing: float
    asking: float

    @property
    def bound(self) -> str:
        """What takes most of a further question."""
        again = {"storage": self.reading * (1 - self.held), "processors": self.computing, "merging": self.asking}
        return max(again, key=lambda name: again[name])


def simulate(costs: Costs, cluster: Cluster, *, patterns: int = PATTERNS, part_bytes: int = SHARD_BYTES) -> Outcome:
    """Return what a question costs on a cluster.

    Workers read their parts and then measure them; the workers of a machine share its network, and reading does not
    overlap with measuring. States are merged by one process as they come, at the end. Keys stay in memory as far as
    they fit; the others are read again by every question.
    """
    size = patterns * KEY_BYTES
    parts = max(1, round(size / part_bytes))
    workers = cluster.machines * cluster.cores
    busiest = -(-parts // workers) / (parts / workers)  # the worker with one part more makes all wait
    requests = parts / workers * cluster.latency
    reading = (size / cluster.machines / cluster.storage_rate + requests) * busiest
    computing = (patterns * costs.product + parts * costs.part) / workers * busiest
    asking = parts * (costs.merge + costs.state_bytes / cluster.network_rate) + workers * costs.ship
    held = min(1.0, HELD_SHARE * cluster.memory * cluster.machines / size)
    return Outcome(
        reading + computing + asking, reading * (1 - held) + computing + asking, held, reading, computing, asking
    )


# What is measured -----------------------------------------------------------------------------------------------------


def record_keys(folder: Path, *, patterns: int, part_bytes: int) -> Run:
    """Record random keys, and return the run."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    options: Any = {"layers": {"*": "keys"}, "dtype": "float16", "shard_bytes": part_bytes}
    with dualform.record(model, optimizer, folder, **options) as recorder:
        for _ in range(0, patterns, 4096):
            recorder.annotate(label=torch.randint(10, (4096,)))
            optimizer.zero_grad()
            model(torch.randn(4096, WIDTH)).sum().backward()
            optimizer.step()
    return Run(folder)


def question(source: PatternSource, seed: int) -> Pass[Any]:
    """Return the question that is measured: the best patterns for some queries."""
    queries = torch.randn(QUERIES, WIDTH, generator=torch.Generator().manual_seed(seed))
    view = WholeView(source, source.steps)
    return Pass("", view, Best(1, BEST), queries, queries, PatternMeasure("attention"))


def fastest(action: Callable[[], object], times: int = 7) -> float:
    """Return the least of several times, in seconds of this process's processor: others only make it slower."""
    found = []
    for _ in range(times):
        begin = time.process_time()
        action()
        found.append(time.process_time() - begin)
    return min(found)


def keep_freed_memory() -> None:
    """Let glibc keep freed memory in this process, as it does in the Ray executor's workers."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 25)  # M_MMAP_THRESHOLD
    libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


def measure(run: Run) -> Costs:
    """Measure what the pieces of a question cost in this process."""
    torch.set_num_threads(1)
    job = question(run, 0)
    pieces = pieces_of(run, job)
    held = HeldKeys(1 << 40)
    states = dict(part_states(run, job, pieces, held))  # from here on keys are held
    counts = {part.index: part.count("") for part in run.parts()}
    whole = fastest(lambda: list(part_states(run, job, pieces, held)))
    small = Pass("", WholeView(run, 1), Best(1, BEST), job.queries, job.queries, PatternMeasure("attention"))  # type: ignore[arg-type]
    first = pieces_of(run, small)
    per_step = sum(counts.values()) / run.steps
    alone = fastest(lambda: list(part_states(run, small, first, held)))
    product = whole / sum(counts.values())
    content = [pickle.dumps(state) for state in states.values()]

    def merge() -> None:
        merged(job, {index: pickle.loads(each) for index, each in zip(states, content, strict=True)})

    size = sum((run.blobs.size(f"shards/{index:06d}.safetensors") or 0) for index in states)

    def read() -> None:
        for part in run.parts():
            part.rows("", "keys").take(slice(None))[0].clone()

    return Costs(
        read=fastest(read) / size,
        product=product,
        part=max(0.0, alone - per_step * product),
        merge=fastest(merge) / len(pieces),
        ship=0.0,
        state_bytes=round(statistics.mean(map(len, content))),
    )


@dataclass(frozen=True, slots=True)
class Check:
    """A further question on a local Ray: what the model says, and what was measured, in processor seconds."""

    workers: int
    predicted: float
    measured: float


def check(run: Run, costs: Costs, count: int) -> tuple[float, Check]:
    """Ask some workers of a local Ray; return what shipping costs, and how the model compares."""
    executor = RayExecutor(count)
    job = question(run, 1)
    for seed in range(2):
        executor.run(run, [question(run, seed)])  # workers have started, opened the run, and hold its keys
    ship = fastest(lambda: executor.process_ids) / count + fastest(lambda: send_job(run, job))
    measured = min(_asked(executor, run, job) for _ in range(7))
    executor.close()
    cluster = Cluster(count, cores=1, memory=1e15, latency=0.0, network_rate=1e12)
    part_bytes = round(run.count("") * KEY_BYTES / len(run.parts()))
    found = simulate(replace(costs, ship=ship), cluster, patterns=run.count(""), part_bytes=part_bytes)
    return ship, Check(count, found.steady, measured)


def _asked(executor: RayExecutor, run: Run, job: Pass[Any]) -> float:
    """Ask once; return the processor seconds of the busiest worker and of this process, which wait for each other."""
    before, begin = executor.processor_seconds(), time.process_time()
    executor.run(run, [job])
    here = time.process_time() - begin
    return here + max(after - start for start, after in zip(before, executor.processor_seconds(), strict=True))


def table(costs: Costs, *, machines: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)) -> str:
    """Return the simulated table, as Markdown."""
    lines = [
        "| machines | keys in memory | first answer | each further one | machine hours, 100 questions | bound by |",
        "|---|---|---|---|---|---|",
    ]
    for count in machines:
        found = simulate(costs, Cluster(count))
        hours = count * (found.first + 99 * found.steady) / 3600
        lines.append(
            f"| {count} | {100 * found.held:.0f} % | {found.first:,.1f} s | {found.steady:,.1f} s | {hours:.2f} | "
            f"{found.bound} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, compare with a local Ray, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patterns", type=int, default=160_000, help="of the run that is measured")
    parser.add_argument("--part-mb", type=int, default=16, help="size of its parts")
    options = parser.parse_args()
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        run = record_keys(Path(folder) / "run", patterns=options.patterns, part_bytes=options.part_mb << 20)
        costs = measure(run)
        found = [check(run, costs, count) for count in (1, 2)]
    costs = replace(costs, ship=found[-1][0])
    out = sys.stdout.write
    out(
        f"{WIDTH} numbers a key in float16, {QUERIES} queries, the {BEST} best; one core:\n"
        f"read {1e-9 / costs.read:.2f} GB/s, product {1e9 * costs.product:.0f} ns a pattern, "
        f"{1e3 * costs.part:.2f} ms a part, merge {1e3 * costs.merge:.2f} ms a part, ship {1e3 * costs.ship:.1f} ms a "
        f"worker, {costs.state_bytes / 1e3:.1f} kB a state\n\n"
    )
    for _, each in found:
        out(
            f"{each.workers} workers here: predicted {each.predicted:.3f} s, measured {each.measured:.3f} s "
            f"({100 * (each.predicted / each.measured - 1):+.0f} %)\n"
        )
    out(f"\n{table(costs)}\n")


if __name__ == "__main__":
    main()
