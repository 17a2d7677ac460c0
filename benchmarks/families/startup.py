"""How long a user waits before anything happens."""

import resource
import subprocess
import sys

from benchmarks.bench import Bench
from benchmarks.rows import Measured, at_most, row
from benchmarks.timing import alternate

HELP = "import sys; sys.argv = ['dualform', '--help']; from dualform.cli import main; main()"
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
    why="`pyarrow` and `pyarrow.compute`, which makes its functions when it is imported, take most of it.",
    ours=FACE,
    theirs="import torch",
)
def startup(bench: Bench, ours: str, theirs: str) -> Measured:
    least, most, warm = (1, 1, 0) if bench.quick else (7, 15, 1)
    used: tuple[list[float], list[float]] = ([], [])
    pairs = alternate(
        lambda: used[0].append(run(ours)),
        lambda: used[1].append(run(theirs)),
        budget=30,
        least=least,
        most=most,
        warm=warm,
    )
    differences = [a - b for a, b in zip(pairs.ours, pairs.theirs, strict=True)]
    added = min(pairs.ours) - min(pairs.theirs)
    detail = {
        "with, s": min(pairs.ours),
        "without, s": min(pairs.theirs),
        "more processor time, s": min(used[0]) - min(used[1]),
    }
    return Measured(added, (min(differences), max(differences)), detail)


def run(code: str) -> float:
    """Run a line in a Python of its own, and return its processor time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
