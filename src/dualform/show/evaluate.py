"""What `dualform evaluate` prints: the score of effects against retraining, with its controls and its ceiling."""

import sys
from pathlib import Path

from dualform.attend.answers import EFFECT_NOTE
from dualform.experiments.truth import evaluate, scores
from dualform.experiments.truth_config import read_config
from dualform.experiments.truth_page import table
from dualform.show.tables import console, print_grid, print_json


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def run_evaluation(path: Path, folder: Path | None, *, device: str, json: bool) -> None:
    """Evaluate a configuration, as far as its folder does not hold it yet, and print what was found."""
    config = read_config(path)
    here = folder or Path("runs/truth") / config.name
    evaluate(config, here, device=device, tell=_tell)
    found = scores(config, here)
    if json:
        print_json({"config": config, "scores": found, "note": EFFECT_NOTE})
        return
    grid = table({config: found})
    screen = console()
    print_grid(screen, f"{grid.title}, mean ± standard error over {config.splits} splits", grid.columns, grid.rows)
    screen.print(EFFECT_NOTE)
