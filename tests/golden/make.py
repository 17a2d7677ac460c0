"""Record the golden runs and write down their answers, with the code that writes today's format.

    PYTHONPATH=src:tests python tests/golden/make.py FOLDER

A format version's runs are made once, before the code starts to write the next version, and never again: what matters
of them is that they were written by the code of their time.
"""

import json
import shutil
import sys
from pathlib import Path

from golden.recipes import RECIPES, ask, record


def main(folder: Path) -> None:
    """Record every recipe below the folder."""
    answers = {}
    for name, recipe in RECIPES.items():
        path = folder / name
        record(path, recipe)
        answers[name] = ask(path, recipe)
        shutil.rmtree(path / "cache", ignore_errors=True)
        (path / ".lock").unlink(missing_ok=True)
    (folder / "answers.json").write_text(json.dumps(answers) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
