"""How long a user waits before anything happens."""

import subprocess
import sys

from benchmarks.bench import Bench
from benchmarks.rows import Measured, at_most, row
from benchmarks.timing import alternate

HELP = "import sys; sys.argv = ['dualform', '--help']; from dualform.show.cli import main; main()"
FACE = "import dualform; [getattr(dualform, name) for name in dualform.__all__]"


@row(
    "help",
    what="`dualform --help`, more than",
    against="an empty Python",
    unit="seconds",
    cpu=at_most(0.3),
    ours=HELP,
    theirs="pass",
)
@row(
    "import",
    what="`import dualform` and every public name, more than",
    against="`import torch`",
    unit="seconds",
    cpu=at_most(0.2),
    ours=FACE,
    theirs="import torch",
)
def startup(bench: Bench, ours: str, theirs: str) -> Measured:
    times = {"least": 1, "most": 1, "warm": 0} if bench.quick else {"least": 7, "most": 15, "warm": 1}
    pairs = alternate(lambda: run(ours), lambda: run(theirs), budget=30, **times)
    differences = [a - b for a, b in zip(pairs.ours, pairs.theirs, strict=True)]
    least = min(pairs.ours) - min(pairs.theirs)
    return Measured(
        least, (min(differences), max(differences)), {"with, s": min(pairs.ours), "without, s": min(pairs.theirs)}
    )


def run(code: str) -> None:
    """Run a line in a Python of its own."""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
