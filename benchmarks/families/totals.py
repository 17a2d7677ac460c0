"""Many queries: attending should cost what the matrix product costs."""

from collections.abc import Callable

import torch
from torch import Tensor

import dualform
from benchmarks.bench import Bench
from benchmarks.families.attention import WIDTH, keys_store
from benchmarks.rows import Measured, at_least, row
from benchmarks.stores import BATCH
from benchmarks.timing import seconds

CHUNKS = (1024, 4096, 16_384, 49_152, 65_536)


@row(
    "totals-128",
    what="totals of magnitude by class for 128 queries, keys of both signs (no shortcut)",
    against="the plain matrix product at its best chunk, keys in memory",
    unit="percent",
    cpu=at_least(0.8),
    cuda=at_least(0.8),
    why={
        "cpu": "of the processor time the product takes 85 %, the sums by class a tenth.",
        "cuda": "absolute values and sums by class are passes of their own over the scores, and a tenth of a "
        "millisecond is Python.",
    },
    queries=128,
    share=1,
)
@row(
    "totals-10000",
    what="totals of magnitude by class for 10,000 queries, keys of both signs (no shortcut)",
    against="the plain matrix product at its best chunk, keys in memory",
    unit="percent",
    cpu=at_least(0.8),
    cuda=at_least(0.8),
    why="absolute values and sums by class are passes of their own over the scores.",
    queries=10_000,
    share=16,
)
def totals(bench: Bench, queries: int, share: int) -> Measured:
    folder, keys = keys_store(bench)
    memory = dualform.open(folder)
    if bench.device.type == "cpu":  # a part of the patterns will do
        keys = keys[: len(keys) // share // BATCH * BATCH]
        memory = memory.at(step=len(keys) // BATCH)
    asked = torch.randn(bench.size(queries, 16), WIDTH, device=bench.device)

    def ours() -> object:  # a spotlight keeps what it has answered, so each time a new one
        return memory.attend(queries={"layers.0": asked})["layers.0"].totals("label", of="magnitude").values

    product, chunk = best_product(bench, asked, keys)
    pairs = bench.alternate(ours, product, budget=60)
    low, high = pairs.spread
    operations = 2 * len(asked) * keys.numel()
    return Measured(
        1 / pairs.ratio,
        (1 / high, 1 / low),
        {
            **pairs.detail("totals", "product"),
            "patterns": len(keys),
            "best chunk": chunk,
            "product, GFLOP/s": operations / min(pairs.theirs) / 1e9,
            "totals, GFLOP/s": operations / min(pairs.ours) / 1e9,
        },
    )


def best_product(bench: Bench, queries: Tensor, keys: Tensor) -> tuple[Callable[[], None], str]:
    """Return the fastest chunked product of queries and keys into a buffer that is there already, and its name."""
    rows = 65_536 if bench.device.type == "cuda" else 49_152 if len(queries) <= 1000 else 4096
    part = keys[: bench.size(rows, 256)]
    found = {}
    for chunk in [size for size in CHUNKS if size <= len(part)] or [len(part)]:
        for name, make in (("queries by keys", _queries_first), ("keys by queries", _keys_first)):
            product = make(queries, part, chunk)
            product()
            found[min(seconds(product, bench.device) for _ in range(2))] = (make, chunk, name)
    make, chunk, name = found[min(found)]
    return make(queries, keys, chunk), f"{chunk}, {name}"


def _queries_first(queries: Tensor, keys: Tensor, chunk: int) -> Callable[[], None]:
    buffer = torch.empty(len(queries) * chunk, dtype=keys.dtype, device=keys.device)

    def product() -> None:
        for part in keys.split(chunk):
            torch.mm(queries, part.T, out=buffer[: len(queries) * len(part)].view(len(queries), len(part)))

    return product


def _keys_first(queries: Tensor, keys: Tensor, chunk: int) -> Callable[[], None]:
    buffer = torch.empty(chunk, len(queries), dtype=keys.dtype, device=keys.device)
    transposed = queries.T.contiguous()

    def product() -> None:
        for part in keys.split(chunk):
            torch.mm(part, transposed, out=buffer[: len(part)])

    return product
