"""`dualform reproduce`: run studies over seeds, print their tables, and with `all` write the page."""

import sys
from pathlib import Path
from typing import Any, get_args

from dualform.errors import QueryError
from dualform.experiments.images import reproduce
from dualform.experiments.page import write_page
from dualform.experiments.studies import NAMES, Name, study
from dualform.experiments.summary import summarise
from dualform.show.tables import console, print_grid, print_json

KEEP = ("first", "all", "none")


def reproduce_studies(
    which: str, data: str, seeds: int, folder: Path, *, keep: str, page: Path | None, device: str, json: bool
) -> None:
    """Run one study or all of them, and show what was found."""
    if which != "all" and which not in get_args(Name):
        raise QueryError(f"There is no study {which!r}; expected {', '.join(NAMES)} or all.")
    if keep not in KEEP:
        raise QueryError(f"--keep is {keep!r}; expected one of {', '.join(KEEP)}.")
    chosen = {name: study(name, data) for name in NAMES if which in (name, "all")}
    findings: dict[str, list[dict[str, Any]]] = {}
    for name, plan in chosen.items():
        findings[name] = []
        for seed in range(seeds):
            sys.stderr.write(f"{name} on {data}, seed {seed} ({seed + 1} of {seeds})\n")
            place = folder / f"{name}-{data}-{seed}"
            kept = keep == "all" or (keep == "first" and seed == 0)
            findings[name].append(reproduce(plan, place, seed=seed, device=device, keep=kept))
        if not json:
            screen = console()
            for grid in summarise(findings[name]):
                print_grid(screen, grid.title, grid.columns, grid.rows)
                screen.print(grid.note + "\n" if grid.note else "")
            screen.print(f"Figures: {folder / f'{name}-{data}-0' / 'figures'}\n", soft_wrap=True)
    if which == "all":
        figures: dict[str, Path] = {name: folder / f"{name}-{data}-0" / "figures" for name in chosen}
        elsewhere = "" if device == "cpu" else f" --device {device}"
        command = f"dualform reproduce all --data {data} --seeds {seeds}{elsewhere}"
        # The published page is that of the paper's data; anything else stays with its runs.
        target = page or (Path("docs/results.md") if data == "mnist" else folder / "results.md")
        write_page(target, findings, figures, command=command)
        sys.stderr.write(f"Wrote {target}\n")
    if json:
        print_json(findings)
