"""Exact search: the best 100 of all keys."""

from collections.abc import Callable

import torch
from torch import Tensor

import dualform
from benchmarks.bench import Bench
from benchmarks.families.attention import WIDTH, keys_store
from benchmarks.rows import REPORTED, Measured, Skip, at_least, row
from dualform.attend.answers import Ranking

K = 100
WHY = {
    1: "the product takes two thirds of the time, and the kept scores are ranked after it.",
    16: "the product: it takes three quarters of the processor time.",
    128: "the product: it takes 80 % of the processor time, finding the best a tenth.",
}
AGAINST = "FAISS IndexFlatIP, same threads, same values (on a GPU: one product and topk, keys in its memory)"


@row("top-1", what="top-100 for 1 query", against=AGAINST, cpu=at_least(1.5), cuda=REPORTED, why=WHY[1], queries=1)
@row("top-16", what="top-100 for 16 queries", against=AGAINST, cpu=at_least(4), cuda=REPORTED, why=WHY[16], queries=16)
@row(
    "top-128",
    what="top-100 for 128 queries",
    against=AGAINST,
    cpu=at_least(8),
    cuda=REPORTED,
    why=WHY[128],
    queries=128,
)
def top(bench: Bench, queries: int) -> Measured:
    folder, keys = keys_store(bench)
    asked = torch.randn(queries, WIDTH, device=bench.device)
    memory = dualform.open(folder)

    def ours() -> Ranking:  # a spotlight keeps what it has answered, so each time a new one
        return memory.attend(queries={"layers.0": asked})["layers.0"].top(K)

    search = _faiss(bench, keys, asked) if bench.device.type == "cpu" else _product(keys, asked)
    differences = compare(ours().patterns[:, 0], *search(), queries=asked, keys=keys)
    pairs = bench.alternate(ours, search, budget=45)
    low, high = pairs.spread
    detail = {**pairs.detail("top-100", "search"), "patterns that differ": differences}
    return Measured(1 / pairs.ratio, (1 / high, 1 / low), detail)


def compare(ours: Tensor, scores: Tensor, theirs: Tensor, *, queries: Tensor, keys: Tensor) -> int:
    """Return how many patterns (Q, k) are only in one answer; raise where that is not a matter of rounding."""
    different = 0
    for q, (mine, other) in enumerate(zip(ours.tolist(), theirs.tolist(), strict=True)):
        odd = sorted(set(mine) ^ set(other))
        different += len(odd)
        exact = keys[odd].double() @ queries[q].double()
        assert bool(((exact - scores[q, -1]).abs() <= 1e-3).all()), f"query {q}: {odd} are no ties"
    return different


def _faiss(bench: Bench, keys: Tensor, queries: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    try:
        import faiss
    except ImportError as error:
        raise Skip("needs faiss-cpu (benchmarks/peers.txt)") from error

    def build() -> object:
        index = faiss.IndexFlatIP(WIDTH)
        index.add(keys.numpy())
        return index

    faiss.omp_set_num_threads(torch.get_num_threads())
    index = bench.once(("faiss", keys.data_ptr()), build)
    asked = queries.numpy()

    def search() -> tuple[Tensor, Tensor]:
        scores, patterns = index.search(asked, K)  # type: ignore[attr-defined]
        return torch.from_numpy(scores), torch.from_numpy(patterns)

    return search


def _product(keys: Tensor, queries: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    def search() -> tuple[Tensor, Tensor]:
        best = (queries @ keys.T).topk(K, dim=1)
        return best.values, best.indices

    return search
