"""Building what the shortcuts need: sums of keys, and of outer products, by group."""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

import dualform
from benchmarks.bench import Bench
from benchmarks.rows import Measured, at_most, row
from benchmarks.stores import CLASSES, Well, store, stored_keys
from benchmarks.timing import seconds
from dualform.attend.sums import LayerSums

WIDTH = 800
AGAINST = "one sequential read of the stored files, plus the arithmetic at the best matrix rate"


@row(
    "key-sums",
    what="building the sums of keys by class (800 wide, 96,000 patterns)",
    against=AGAINST,
    cpu=at_most(1.5),
    why="opening the run and grouping its patterns.",
    what_is_built="keys",
)
@row(
    "group-weights",
    what="building the weights of ten classes (800 by 800, 96,000 patterns)",
    against=AGAINST,
    cpu=at_most(1.5),
    why="ten products of a tenth of a chunk each, after gathering their rows, instead of one; and float64 sums.",
    what_is_built="shares",
)
def sums(bench: Bench, what_is_built: str) -> Measured:
    patterns = bench.size(96_000, 1280)
    shares = what_is_built == "shares"
    folder = store(bench, patterns, Well(WIDTH, WIDTH if shares else 1), values=shares)

    def ours() -> object:
        shutil.rmtree(folder / "cache", ignore_errors=True)
        spotlight = dualform.open(folder).attend(queries={"layers.0": torch.zeros(1, WIDTH)})["layers.0"]
        built: LayerSums = spotlight._sums
        grouping = spotlight._group("label")
        return built.shares(grouping) if shares else spotlight._answer(built.plan_keys(grouping))

    files = sorted(folder.glob("shards/*.safetensors"))
    product = _outer_products(bench, folder, patterns) if shares else _member_products(bench, folder, patterns)

    def theirs() -> None:
        read(files)
        product()

    pairs = bench.alternate(ours, theirs, budget=45)
    return Measured(
        pairs.ratio,
        pairs.spread,
        {
            **pairs.detail("building", "reading and arithmetic"),
            "reading alone, s": min(seconds(lambda: read(files)) for _ in range(3)),
            "arithmetic alone, s": min(seconds(product) for _ in range(1 if bench.quick else 3)),
        },
    )


def read(files: Iterable[Path]) -> None:
    """Read files from their first byte to their last, into a buffer that is used again."""
    buffer = bytearray(8 << 20)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _outer_products(bench: Bench, folder: Path, patterns: int) -> Callable[[], None]:
    """Return the sum of all outer products, as one matrix product per chunk, at the chunk that is fastest."""
    rows = min(patterns, 16_384)
    keys, values = torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)
    buffer = torch.zeros(WIDTH, WIDTH)

    def product(chunk: int, count: int) -> Callable[[], None]:
        def run() -> None:
            for start in range(0, count, chunk):
                at = start % rows
                size = min(chunk, count - start, rows - at)
                torch.addmm(buffer, values[at : at + size].T, keys[at : at + size], out=buffer)

        return run

    found = {}
    for chunk in (512, 2048, 8192):
        product(chunk, rows)()
        found[min(seconds(product(chunk, rows)) for _ in range(3))] = chunk
    return product(found[min(found)], patterns)


def _member_products(bench: Bench, folder: Path, patterns: int) -> Callable[[], None]:
    """Return the sum of keys by class: a product with the matrix that says which key is in which class."""
    keys = stored_keys(folder, "layers.0")
    members = torch.zeros(CLASSES, patterns)
    members[torch.randint(CLASSES, (patterns,)), torch.arange(patterns)] = 1
    buffer = torch.empty(CLASSES, WIDTH)

    def product() -> None:
        torch.mm(members, keys, out=buffer)

    return product
