"""Run the campaigns: `python -m torture --help`."""

import argparse
import dataclasses
import json
import os
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torture
from torture.outcome import Outcome

CAMPAIGNS = ("kills", "process_kills", "interrupts", "forgeries", "clients")
FIGURES = Path(__file__).parent / "results.json"
SEED = 2022


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen campaigns, print what they did, write it as JSON; or write the page from what was found."""
    options = _parser().parse_args(arguments)
    from torture.page import PAGE, machine, merged, page, print_table

    figures: Path = options.json or FIGURES
    if options.page:
        PAGE.write_text(page(json.loads(figures.read_text(encoding="utf-8"))), encoding="utf-8")
        return 0
    chosen = [name for name in options.only or CAMPAIGNS if find_spec(f"torture.{name}") is not None]
    missing = [name for name in options.only or () if name not in chosen]
    if missing:
        sys.exit(f"There is no campaign {', '.join(missing)}. There are: {', '.join(CAMPAIGNS)}.")
    warnings.simplefilter("ignore")  # of recordings that are interrupted on purpose
    outcomes = []
    for name in chosen:
        print(f"{name} ...", file=sys.stderr, flush=True)
        outcomes.append(_run(name, options.folder, short=options.short, seed=options.seed, count=options.count))
        if options.json or not options.short:
            figures.parent.mkdir(parents=True, exist_ok=True)
            found = merged(figures, machine(), outcomes, short=options.short, seed=options.seed)
            figures.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print_table(outcomes)
    return int(any(outcome.failures for outcome in outcomes))


def _run(name: str, place: Path | None, *, short: bool, seed: int, count: int | None) -> Outcome:
    campaign = import_module(f"torture.{name}")
    with tempfile.TemporaryDirectory(prefix=f"torture-{name}-", dir=place or _memory()) as folder:
        try:
            outcome: Outcome = campaign.run(Path(folder), short=short, seed=seed, count=count)
        except Exception as error:  # one broken campaign does not cost the others
            traceback.print_exc()
            outcome = Outcome(name, failures=[f"the campaign itself broke: {type(error).__name__}: {error}"])
    return dataclasses.replace(outcome, seconds=round(outcome.seconds, 1))


def _memory() -> Path | None:
    """Return a folder that lies in memory, where there is one.

    A killed process takes nothing of the system's page cache with it, so that nothing is learnt by waiting for a disk.
    """
    place = Path("/dev/shm")
    return place if place.is_dir() and os.access(place, os.W_OK) and shutil.disk_usage(place).free > 1 << 30 else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/torture", description=torture.__doc__)
    parser.add_argument("--short", action="store_true", help="a few seconds of each campaign, as the tests run it")
    parser.add_argument("--only", action="append", choices=CAMPAIGNS, help="run this campaign alone; repeatable")
    parser.add_argument("--seed", type=int, default=SEED, help=f"of every random moment; {SEED} by default")
    parser.add_argument("--count", type=int, help="kills, interrupts or inputs, instead of the campaign's own number")
    parser.add_argument("--folder", type=Path, help="where run folders are made; in memory by default, where it can be")
    parser.add_argument(
        "--json", type=Path, help=f"where the figures are written; {FIGURES.name} beside this by default"
    )
    parser.add_argument(
        "--page", action="store_true", help="write docs/reliability.md from the figures, attack nothing"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
