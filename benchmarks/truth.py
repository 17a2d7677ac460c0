"""Do effects predict retraining, and how well do other libraries? Retrains, records, asks all of them, prints a table.

    python -m benchmarks.truth benchmarks/truth/*.toml [--folder runs/truth] [--splits 0 1] [--page docs/results.md]

Goes on where an earlier run stopped. What was found is kept in benchmarks/truth/results, each score under the number of
its split, so that splits may be run one at a time, in folders of their own. The page is written from there: without
recipes, from what was found before. Peers (kronfluence, traker, captum) are asked where they are installed; what a peer
said once is kept, so that they may be installed one after the other, or in an environment of their own.
"""

import argparse
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file

from benchmarks.truth_peers import PEERS, costs_of, installed
from dualform.experiments.page import write_page
from dualform.experiments.retraining import costs, evaluate_effects, finished_splits, scores
from dualform.experiments.retraining_config import RetrainingConfig, make_split, read_config
from dualform.experiments.retraining_page import section, table
from dualform.experiments.retraining_results import Evaluation, load_evaluations, store_costs, store_evaluation
from dualform.show.terminal_tables import console, print_grid


def tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def ask_peers(config: RetrainingConfig, folder: Path, names: list[str], splits: Iterable[int]) -> None:
    """Ask every installed peer about every finished split of those chosen that it has not been asked about."""
    for number in sorted(set(finished_splits(config, folder)) & set(splits)):
        split, here = make_split(config, number), folder / f"split-{number}"
        for name in installed(names):
            path = here / f"peer-{name}.safetensors"
            if path.is_file():
                continue
            start = time.perf_counter()
            found = PEERS[name][1](config, split, here)
            store_costs(path.with_suffix(".json"), costs_of(found))
            save_file({label: said.scores.float().contiguous() for label, said in found.items()}, path)
            tell(f"{config.name}: split {number}, asked {name}, {time.perf_counter() - start:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", type=Path, nargs="*")
    parser.add_argument("--folder", type=Path, default=Path("runs/truth"))
    parser.add_argument("--splits", type=int, nargs="+", help="the numbers of the splits to run, from 0; default all")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "truth" / "results")
    parser.add_argument("--page", type=Path, help="the page whose section on effects to write")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--device", default="cpu", help="where to retrain")
    chosen = parser.parse_args()
    if missing := sorted(set(chosen.peers) - set(installed(chosen.peers))):
        tell(f"not installed, and not asked: {', '.join(missing)}")
    for path in chosen.configs:
        config = read_config(path)
        folder = chosen.folder / config.name
        splits = range(config.splits) if chosen.splits is None else chosen.splits
        evaluate_effects(config, folder, splits=splits, device=chosen.device, tell=tell)
        ask_peers(config, folder, chosen.peers, splits)
        store_evaluation(chosen.results, Evaluation(config, scores(config, folder), costs=costs(config, folder)))
    found = load_evaluations(chosen.results)
    grid = table(found)
    print_grid(console(), grid.title, grid.columns, grid.rows)
    if chosen.page is not None:
        write_page(chosen.page, [section(found)])


if __name__ == "__main__":
    main()
