"""Memory while attending to a run that is larger than the memory that is allowed."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.bench import Bench
from benchmarks.rows import Measured, at_most, between, row
from benchmarks.stores import Well, bytes_of, store

WIDTH = 800
WHY = "files of a run of up to 1.3 GB stay mapped, and maps count, though the system may take them back."
QUESTIONS = """
import json, pathlib, sys, torch, dualform
def status(name):  # getrusage would count what the parent took before this process became itself
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))
queries = torch.randn(int(sys.argv[2]), int(sys.argv[3]))
memory = dualform.open(sys.argv[1])
layer = memory.attend(queries={"layers.0": queries})["layers.0"]
before = status("VmHWM")
layer.totals("label", of="magnitude")
layer.totals("label")
layer.top(100)
found = {"peak": status("VmHWM"), "anonymous": status("RssAnon"), "mapped": status("RssFile")}
print(json.dumps({**found, "before": before, "queries": queries.nbytes}))
"""


@row(
    "memory",
    what="peak memory of a process that takes totals and the top 100 of a run of 3.1 GB, without its 128 queries",
    against="1 GB, torch included",
    unit="GB",
    cpu=at_most(1.0),
    why=WHY,
)
def memory(bench: Bench) -> Measured:
    whole = _store(bench, 1)
    found = ask(whole)
    detail = {
        "run, GB": bytes_of(whole) / 1e9,
        "before the first question, GB": found["before"] / 1e9,
        "at the end, GB": found["anonymous"] / 1e9,
        "and maps of files, GB": found["mapped"] / 1e9,
    }
    return Measured((found["peak"] - found["queries"]) / 1e9, None, detail)


@row(
    "memory-growth",
    what="peak memory over that run",
    against="peak memory over a run of half its size",
    cpu=between(0.9, 1.1),
    why=WHY,
)
def memory_growth(bench: Bench) -> Measured:
    whole, half = ask(_store(bench, 1))["peak"], ask(_store(bench, 2))["peak"]
    return Measured(whole / half, None, {"whole, GB": whole / 1e9, "half, GB": half / 1e9})


def _store(bench: Bench, divided: int) -> Path:
    return store(bench, bench.size(960_000, 4096) // divided, Well(WIDTH), batch=1024)


def ask(folder: Path) -> dict[str, int]:
    """Ask a run in a process of its own, and return what that process took."""
    command = [sys.executable, "-c", QUESTIONS, str(folder), "128", str(WIDTH)]
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, int] = json.loads(answer.stdout)
    return found
