"""Run the suite: `python -m benchmarks --help`."""

import argparse
import json
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import torch

import benchmarks
from benchmarks import families
from benchmarks.bench import Bench
from benchmarks.families import ORDER
from benchmarks.report import PAGE, RESULTS, Result, machine, merged, page, print_table, run
from benchmarks.rows import Row, ordered


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the chosen rows, print them, and write them as JSON; or write the page from what was measured."""
    options = _parser().parse_args(arguments)
    import_families()
    if options.page:
        PAGE.write_text(page(RESULTS, ordered()), encoding="utf-8")
        return 0
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    rows = _chosen(options.only, device.type)
    if options.list:
        for each in rows:
            print(f"{each.name:24} {each.what}")
        return 0
    warnings.simplefilter("ignore")  # layers that are left out on purpose
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=options.folder))
    results = []
    target: Path = options.json or (options.folder / "quick.json" if options.quick else RESULTS / f"{device.type}.json")
    try:
        bench = Bench(folder, device, quick=options.quick)
        for each in rows:
            results.append(_run(each, bench))
            target.parent.mkdir(parents=True, exist_ok=True)
            found = merged(target, machine(device), results, keep=options.only is not None)
            target.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print_table(results, rows, device)
    return int(any(result.failure for result in results))


def import_families() -> None:
    """Import every family of rows."""
    names = [module.name for module in iter_modules(families.__path__)]
    for name in sorted(names, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER)):
        import_module(f"{families.__name__}.{name}")


def _run(each: Row, bench: Bench) -> Result:
    print(f"{each.name} ...", file=sys.stderr, flush=True)
    try:
        return run(each, bench)
    except Exception as error:  # one broken row does not cost the others
        traceback.print_exc()
        return Result(each.name, failure=f"{type(error).__name__}: {error}")


def _chosen(only: list[str] | None, device: str) -> list[Row]:
    here = [each for each in ordered() if device in each.goals]
    if only is None:
        return here
    chosen = [each for each in here if any(each.name == name or each.name.startswith(f"{name}-") for name in only)]
    if not chosen:
        raise SystemExit(f"No row {', '.join(only)} on {device}. There are: {', '.join(each.name for each in here)}.")
    return chosen


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=benchmarks.__doc__)
    parser.add_argument(
        "--only", action="append", metavar="ROW", help="measure this row, or family of rows; repeatable"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that every row works, measures nothing")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, help="of torch, and of what it is compared with")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs"), help="where runs are recorded: the disk to measure"
    )
    parser.add_argument("--json", type=Path, help="where to write the figures, instead of benchmarks/results")
    parser.add_argument(
        "--page", action="store_true", help="write docs/performance.md from the figures, measure nothing"
    )
    parser.add_argument("--list", action="store_true", help="list the rows, measure nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
