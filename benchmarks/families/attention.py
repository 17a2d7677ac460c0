"""One query: attending should cost what reading the keys costs."""

import torch

import dualform
from benchmarks.bench import Bench
from benchmarks.rows import Measured, at_least, row
from benchmarks.stores import Well, store, stored_keys

WIDTH = 800


def keys_store(bench: Bench) -> tuple[str, torch.Tensor]:
    """Return the path of the run that attention, totals and top-k share, and its keys in the device's memory."""
    folder = store(bench, bench.size(384_000, 2560), Well(WIDTH))
    keys = bench.once(("keys", folder), lambda: stored_keys(folder, "layers.0").to(bench.device))
    return str(folder), keys


@row(
    "attention",
    what="attention for 1 query over 384,000 keys of width 800",
    against="reading the same bytes from memory (the sum of a tensor)",
    unit="percent",
    cpu=at_least(0.75),
    cuda=at_least(0.75),
    why={
        "cpu": "both are bound by the machine's memory, and the product of one query with two halves of the keys takes "
        "1.2 times the processor time of their sum.",
        "cuda": "Python: the calls before the product are not hidden behind it.",
    },
)
def attention(bench: Bench) -> Measured:
    folder, keys = keys_store(bench)
    memory = dualform.open(folder)
    query = torch.randn(1, WIDTH, device=bench.device)

    def ours() -> torch.Tensor:  # a spotlight keeps what it has answered, so each time a new one
        return memory.attend(queries={"layers.0": query})["layers.0"].attention()

    torch.testing.assert_close(ours(), query @ keys.T, rtol=1e-3, atol=1e-3)
    pairs = bench.alternate(ours, keys.sum)
    low, high = pairs.spread
    return Measured(
        1 / pairs.ratio,
        (1 / high, 1 / low),
        {
            **pairs.detail("attention", "reading"),
            "reading, GB/s": keys.nbytes / min(pairs.theirs) / 1e9,
            "attending, GB/s": keys.nbytes / min(pairs.ours) / 1e9,
        },
    )
