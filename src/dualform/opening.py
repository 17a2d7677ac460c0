"""Open a recorded run: the place where a store, an executor and a memory are put together."""

from collections.abc import Hashable
from importlib import import_module

from dualform.attend.memory import Memory
from dualform.engine.jobs import Executor
from dualform.errors import CorruptError, QueryError
from dualform.replaying.replay_executor import ReplayExecutor
from dualform.replaying.replay_sink import OnDifference
from dualform.replaying.replayed_patterns import ReplayedPatterns
from dualform.replaying.training import Train as Train
from dualform.store.blobs import Blob
from dualform.store.format import FINAL, FROZEN, MANIFEST, UNCOVERED
from dualform.store.manifest import Manifest
from dualform.store.places import Place, as_blobs
from dualform.store.reader import Run
from dualform.store.run_copy import copy_run as copy_run

REWRITTEN = (FINAL, FROZEN, UNCOVERED)  # a resumed recording writes them again under the same names


EXECUTORS = {
    "local": "dualform.engine.local:LocalExecutor",
    "ray": "dualform.engine.ray_executor:shared_executor",
    "distributed": "dualform.engine.distributed:DistributedExecutor",
}
"""The executors that have a name, and where the functions or classes are that return one."""


def open(
    path: Place,
    *,
    executor: Executor | str | None = None,
    train: Train | None = None,
    trust: bool = False,
    on_difference: OnDifference = "stop",
) -> Memory:
    """Open a recorded run.

    Args:
        path: the run folder; its address in object storage, "s3://bucket/run" (also gs:// and az://, with the package
            extra `cloud`); or the `Blobs` that the run is kept in.
        executor: runs the questions over the patterns: "local", the default, uses threads on this machine, or its GPU;
            "ray" the workers of a Ray cluster, or some here (with the package extra `ray`); "distributed" the processes
            of a training with torch.distributed, which all have to ask. Or an `Executor` of your own.
        train: of a run that keeps steps, its training function, which questions run again; by default the one that the
            run remembers.
        trust: call the training function that the run remembers, wherever it is defined (docs/security.md).
        on_difference: where a replay is not the recorded training to the bit, `"stop"` with the first difference, or
            `"report"`: answer, and warn of the measured drift of the weights.
    """
    run = Run(path)
    runner = make_executor(executor) if isinstance(executor, str) else executor
    if all(entry.store != "steps" for entry in run.description.layers.values()):
        return Memory(run, runner)
    source = ReplayedPatterns(run, train, trust=trust, on_difference=on_difference)
    return Memory(source, ReplayExecutor(runner))


def make_executor(name: str) -> Executor:
    """Return an executor by its name."""
    if name not in EXECUTORS:
        raise QueryError(f"There is no executor {name!r}. There are: {', '.join(EXECUTORS)}.")
    module, _, maker = EXECUTORS[name].partition(":")
    made: Executor = getattr(import_module(module), maker)()
    return made


def published_stamp(path: Place) -> Hashable | None:
    """Return a value that changes whenever more of a run is published, fast to come by; None where there is no run."""
    return as_blobs(path).stamp(MANIFEST)


def check_end_state(path: Place) -> None:
    """Raise where the model's state at the end is not that of the manifest: an older manifest was put back."""
    blobs = as_blobs(path)
    listed = Manifest.read(blobs).files
    for blob in (Blob(blobs, name) for name in REWRITTEN if name in listed):
        if blob.checksum() != listed[blob.name].xxh3:
            raise CorruptError(
                f"{blob} is not the file that the manifest lists. Restore both from one copy of the run."
            )
