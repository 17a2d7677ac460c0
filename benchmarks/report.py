"""From measured rows to a table, to JSON, and to docs/performance.md."""

import json
import math
import os
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.bench import Bench
from benchmarks.rows import Row, Skip, show

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PAGE = HERE.parent / "docs" / "performance.md"


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one row."""

    name: str
    value: float = math.nan
    spread: tuple[float, float] | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)
    skipped: str = ""
    failure: str = ""
    seconds: float = 0.0


def run(row: Row, bench: Bench) -> Result:
    """Measure a row."""
    start = time.perf_counter()
    try:
        found = row.measure(bench)
    except Skip as reason:
        return Result(row.name, skipped=str(reason))
    return Result(row.name, found.value, found.spread, dict(found.detail), seconds=time.perf_counter() - start)


def machine(device: torch.device) -> dict[str, Any]:
    """Describe what was measured on."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "waiting": os.environ.get("OMP_WAIT_POLICY", "default"),
        "gpu": gpu,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
        "date": time.strftime("%Y-%m-%d"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


SAME_MACHINE = ("processor", "gpu", "torch")
"""What rows of one page have in common, unless they say otherwise."""


def merged(path: Path, where: Mapping[str, Any], results: Iterable[Result], *, keep: bool) -> dict[str, Any]:
    """Return what the file should hold: these results, and with `keep` the others that it holds already.

    A row that is kept from another machine says so in its details.
    """
    before: dict[str, Any] = {"machine": where, "rows": {}}
    if keep and path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
    there = before["machine"]
    if any(there.get(name) != where.get(name) for name in SAME_MACHINE):
        text = f"{there.get('gpu') or there.get('processor')}, torch {there.get('torch')}, {there.get('date')}"
        for kept in before["rows"].values():
            kept["detail"] = {"measured on": text} | kept["detail"]
    return {"machine": dict(where), "rows": before["rows"] | {result.name: asdict(result) for result in results}}


def verdict(row: Row, result: Result, device: str) -> str:
    """Return "met", "missed", "" for a row without a goal, or why there is no figure."""
    if result.failure:
        return f"failed: {result.failure}"
    if result.skipped:
        return f"skipped: {result.skipped}"
    met = row.goals[device].met(result.value)
    return "" if met is None else "met" if met else "missed"


def cells(row: Row, result: Result, device: str) -> list[str]:
    """Return a row's cells: what, against, goal, measured, met or missed."""
    measured = ""
    if not result.failure and not result.skipped:
        measured = show(result.value, row.unit)
        if result.spread is not None and result.spread[0] != result.spread[1]:
            measured += f" ({show(result.spread[0], row.unit)} to {show(result.spread[1], row.unit)})"
    return [row.what, row.against, row.goals[device].text(row.unit), measured, verdict(row, result, device)]


HEAD = ["what", "against", "goal", "measured", "goal met?"]


def print_table(results: Sequence[Result], rows: Sequence[Row], device: torch.device) -> None:
    """Print one table."""
    by_name = {row.name: row for row in rows}
    console = Console()
    table = Table(*HEAD, title=f"dualform on {machine(device)['gpu'] or machine(device)['processor']}")
    for result in results:
        table.add_row(*cells(by_name[result.name], result, device.type))
    (console if console.is_terminal else Console(width=160)).print(table)


def page(results: Path, rows: Sequence[Row]) -> str:
    """Return docs/performance.md from the figures that are there."""
    parts = [
        "# Performance",
        "",
        "Written by `scripts/bench --page` from `benchmarks/results/`; not by hand.",
        "",
        "Every figure compares two things that were run in turn in the same process: a time on a shared machine means",
        "nothing alone. It is the ratio of the shortest run of each; in brackets are the least and the greatest ratio",
        "of one pair of runs. Threads wait passively: spinning would measure the neighbours on a shared machine.",
        "",
        "Run it yourself:",
        "",
        "    scripts/bench                       # all rows, on the CPU, about half an hour and 15 GB of disk",
        "    scripts/bench --only totals         # one row, or one family of rows",
        "    scripts/bench --device cuda         # on a GPU",
        "    scripts/bench --page                # this page, from what was measured",
        "",
        "On a GPU machine without duckdb or scikit-learn: `PYTHONPATH=src python -m benchmarks --device cuda`.",
    ]
    for device, title in (("cpu", "CPU"), ("cuda", "GPU")):
        path = results / f"{device}.json"
        if path.is_file():
            parts += ["", *_section(title, device, json.loads(path.read_text(encoding="utf-8")), rows)]
    return "\n".join(parts) + "\n"


def _section(title: str, device: str, found: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    where = found["machine"]
    results = {name: Result(**entry) for name, entry in found["rows"].items()}
    named = [(row, results[row.name]) for row in rows if row.name in results and device in row.goals]
    lines = [
        f"## {title}: {where['gpu'] or where['processor']}",
        "",
        f"{where['threads']} threads, torch {where['torch']}, Python {where['python']}, {where['date']}; "
        f"waiting threads: {where['waiting']}; "
        f"load average {where.get('load', 'not noted')} on {where['cores']} cores.",
        "",
        "| row | what | against | goal | measured | |",
        "|---|---|---|---|---|---|",
    ]
    for row, result in named:
        *head, last = cells(row, result, device)
        lines.append(f"| `{row.name}` | {' | '.join(head)} | {f'**{last}**' if last == 'missed' else last} |")
    missed = [row for row, result in named if verdict(row, result, device) == "missed"]
    if missed:
        lines += ["", "### What misses its goal, and why", ""]
        lines += [f"- `{row.name}`: {row.why.get(device) or 'not explained yet.'}" for row in missed]
    lines += ["", "### Details", ""]
    for row, result in named:
        if result.detail:
            lines.append(f"- `{row.name}`: " + "; ".join(f"{k} {_number(v)}" for k, v in result.detail.items()))
    return lines


def _number(value: Any) -> str:
    if isinstance(value, int) or (isinstance(value, float) and abs(value) >= 1000):
        return f"{value:,.0f}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
