"""Whether a recording goes on with an earlier one: decided when a framework has loaded its own checkpoint."""

import os
from typing import Literal

import dualform
from dualform.errors import RunNotFoundError

Resume = bool | int | Literal["auto"]


def decide_resume(resume: Resume, path: str | os.PathLike[str], *, step: int) -> bool | int:
    """Return what `dualform.record` takes as `resume`.

    Args:
        resume: what the user wants; `"auto"` continues the run in `path` where there is one and a checkpoint was
            loaded.
        path: the run folder.
        step: the step at which the framework begins; above 0 after it has loaded a checkpoint.
    """
    return resume if resume != "auto" else step > 0 and _holds_run(path)


def _holds_run(path: str | os.PathLike[str]) -> bool:
    try:
        dualform.open(path)
    except RunNotFoundError:
        return False
    return True
