"""Open a recorded run: the place where a store, an executor and a memory are put together."""

import os
from collections.abc import Hashable

from dualform.attend.memory import Memory
from dualform.engine.jobs import Executor
from dualform.errors import CorruptError
from dualform.replaying.replay_executor import ReplayExecutor
from dualform.replaying.replay_sink import OnDifference
from dualform.replaying.replayed_patterns import ReplayedPatterns
from dualform.replaying.training import Train
from dualform.store.blobs import Blob, Blobs
from dualform.store.folder_blobs import as_blobs
from dualform.store.format import FINAL, FROZEN, MANIFEST, UNCOVERED
from dualform.store.manifest import Manifest
from dualform.store.reader import Run

REWRITTEN = (FINAL, FROZEN, UNCOVERED)  # a resumed recording writes them again under the same names


def open(
    path: str | os.PathLike[str] | Blobs,
    *,
    executor: Executor | None = None,
    train: Train | None = None,
    trust: bool = False,
    on_difference: OnDifference = "stop",
) -> Memory:
    """Open a recorded run.

    Args:
        path: the run folder, or the `Blobs` that the run is kept in.
        executor: runs the questions over the patterns; by default threads on this machine, or its GPU.
        train: of a run that keeps steps, its training function, which questions run again; by default the one that the
            run remembers.
        trust: call the training function that the run remembers, wherever it is defined (docs/security.md).
        on_difference: where a replay is not the recorded training to the bit, `"stop"` with the first difference, or
            `"report"`: answer, and warn of the measured drift of the weights.
    """
    run = Run(path)
    if all(entry.store != "steps" for entry in run.description.layers.values()):
        return Memory(run, executor)
    source = ReplayedPatterns(run, train, trust=trust, on_difference=on_difference)
    return Memory(source, ReplayExecutor(executor))


def published_stamp(path: str | os.PathLike[str] | Blobs) -> Hashable | None:
    """Return a value that changes whenever more of a run is published, fast to come by; None where there is no run."""
    return as_blobs(path).stamp(MANIFEST)


def check_end_state(path: str | os.PathLike[str] | Blobs) -> None:
    """Raise where the model's state at the end is not that of the manifest: an older manifest was put back."""
    blobs = as_blobs(path)
    listed = Manifest.read(blobs).files
    for blob in (Blob(blobs, name) for name in REWRITTEN if name in listed):
        if blob.checksum() != listed[blob.name].xxh3:
            raise CorruptError(
                f"{blob} is not the file that the manifest lists. Restore both from one copy of the run."
            )
