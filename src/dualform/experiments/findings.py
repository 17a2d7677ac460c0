"""Findings: what a study found with one seed, stored as JSON beside its run, with the time and the machine it took."""

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

from dualform._version import __version__
from dualform.engine.verification import Verification
from dualform.show.tables import plain

FINDINGS = "findings.json"
T = TypeVar("T")
Row = dict[str, Any]


@dataclass(slots=True)
class Clock:
    """Seconds spent, by what they were spent on."""

    seconds: dict[str, float]

    def __call__(self, what: str, action: Callable[[], T]) -> T:
        """Run something and note how long it took."""
        start = time.perf_counter()
        result = action()
        self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - start
        return result


def make_room(folder: Path, study: Any, *, seed: int, keep: bool) -> Row | None:
    """Return the findings that a folder holds already for this very study, or nothing, having emptied it.

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


def store(folder: Path, findings: Row) -> Row:
    """Write findings, and return them as they will be read."""
    path = folder / FINDINGS
    path.write_text(json.dumps(plain(findings), indent=1) + "\n")
    result: Row = json.loads(path.read_text())
    return result


def exactness(verification: Verification) -> list[Row]:
    """Return what is stored of each layer, and how well it is rebuilt; no error for keys only."""
    return [
        {"layer": c.layer, "patterns": c.patterns, "bytes": c.bytes, "relative_error": c.error}
        for c in verification.layers
    ]


def machine(device: str) -> Row:
    """Describe what the numbers were measured on."""
    gpu = torch.cuda.get_device_name() if device.startswith("cuda") else None
    return {
        "processor": gpu or f"{platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "versions": {"dualform": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
