"""Open a recorded run: the place where a store, an executor and a memory are put together."""

import os
from pathlib import Path

from dualform.attend.memory import Memory
from dualform.engine.jobs import Executor
from dualform.store.reader import Run


def open(path: str | os.PathLike[str], *, executor: Executor | None = None) -> Memory:
    """Open a recorded run.

    Args:
        path: the run folder.
        executor: runs the questions over the patterns; by default threads on this machine, or its GPU.
    """
    return Memory(Run(Path(path)), executor)
