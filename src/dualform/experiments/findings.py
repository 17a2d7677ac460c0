"""Findings: the results of a study with one seed, stored as JSON beside its run, with its time and its machine."""

import json
import os
import platform
import resource
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from dualform._version import __version__
from dualform.attend.memory import Memory
from dualform.engine.verification import Verification
from dualform.show.terminal_tables import plain

FINDINGS = "findings.json"
T = TypeVar("T")
Row = dict[str, Any]


@dataclass(slots=True)
class Clock:
    """Seconds spent on each part of a study, by the name of the part."""

    seconds: dict[str, float]

    def __call__(self, what: str, action: Callable[[], T]) -> T:
        """Run something and note how long it took."""
        start = time.perf_counter()
        result = action()
        self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - start
        return result


def make_room(folder: Path, study: Any, *, seed: int, keep: bool) -> Row | None:
    """Return the findings that a folder holds already for this very study; otherwise empty it and return None.

    Args:
        folder: the folder of a study and seed.
        study: what is to be done, a dataclass.
        seed: its seed.
        keep: whether the recorded run is wanted too.
    """
    stored = folder / FINDINGS
    if stored.is_file():
        found: Row = json.loads(stored.read_text())
        if found["study"] == plain(study) and found["seed"] == seed and (not keep or (folder / "run").is_dir()):
            return found
    if folder.exists():
        shutil.rmtree(folder)
    return None


def verified_findings(memory: Memory, model: nn.Module, study: Any, clock: Clock, *, seed: int) -> Row:
    """Return the findings that every study begins with: what it was, and whether its patterns rebuild the model."""
    verification = clock("verify", lambda: memory.verify(model))
    return {
        "study": plain(study),
        "seed": seed,
        "verified": verification.passed,
        "layers": exactness(verification),
    }


def finish_study(folder: Path, findings: Row, clock: Clock, *, device: str, keep: bool) -> Row:
    """Store findings with their times and their machine, remove the run unless it is kept, and return them."""
    result = store_findings(folder, findings | {"seconds": clock.seconds, "machine": describe_machine(device)})
    if not keep:
        shutil.rmtree(folder / "run")
    return result


def store_findings(folder: Path, findings: Row) -> Row:
    """Write findings as JSON, and return them as JSON gives them back."""
    path = folder / FINDINGS
    path.write_text(json.dumps(plain(findings), indent=1) + "\n")
    result: Row = json.loads(path.read_text())
    return result


def exactness(verification: Verification) -> list[Row]:
    """Return the patterns, bytes and rebuild error of each layer; the error is None for keys only.

    Of a layer that keeps shares also what no pattern explains, and rounding, relative to the change.
    """
    return [
        {
            "layer": c.layer,
            "patterns": c.patterns,
            "bytes": c.bytes,
            "relative_error": c.error,
            **({} if c.unexplained is None else {"unexplained": c.unexplained, "rounding": c.rounding}),
        }
        for c in verification.layers
    ]


def describe_machine(device: str) -> Row:
    """Describe the machine and the software that the numbers were measured with."""
    gpu = torch.cuda.get_device_name() if device.startswith("cuda") else None
    return {
        "processor": gpu or f"{platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "versions": {"dualform": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
