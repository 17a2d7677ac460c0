"""Twice the patterns, twice the time."""

import torch

import dualform
from benchmarks.bench import Bench
from benchmarks.families.attention import WIDTH, keys_store
from benchmarks.rows import Measured, between, row

AGAINST = "the same over half of the patterns"


@row(
    "growth-totals",
    what="totals of magnitude, 128 queries, 384,000 patterns",
    against=AGAINST,
    cpu=between(1.9, 2.1),
    of="totals",
)
@row(
    "growth-top",
    what="top-100, 16 queries, 384,000 patterns",
    against=AGAINST,
    cpu=between(1.9, 2.1),
    why="it takes less than twice the time: ranking the first scores, and what beats them, costs nearly the same.",
    of="top",
)
def growth(bench: Bench, of: str) -> Measured:
    folder, _ = keys_store(bench)
    memory = dualform.open(folder)
    queries = {"layers.0": torch.randn(128 if of == "totals" else 16, WIDTH)}

    def ask(memory: dualform.Memory) -> object:
        layer = memory.attend(queries=queries)["layers.0"]
        return layer.totals("label", of="magnitude") if of == "totals" else layer.top(100)

    half = memory.at(step=memory.step // 2)
    pairs = bench.alternate(lambda: ask(memory), lambda: ask(half), budget=45, least=5)
    return Measured(pairs.ratio, pairs.spread, pairs.detail("whole", "half"))
