"""The paper's Table 1: the class with the largest total attention, for every test image and layer."""

import torch
from torch import Tensor

import dualform
from benchmarks.bench import Bench
from benchmarks.rows import Measured, at_least, row
from benchmarks.stores import BATCH, CLASSES, Well, store, stored_keys
from benchmarks.timing import alternate

AGAINST = (
    "the authors' procedure (one product per recorded step, absolute values, per-class masks), "
    "timed on a part of the steps and scaled"
)


@row(
    "table1",
    what="Table 1 over 10,000 test images, 384,000 patterns, three layers, sums cached; inputs from 0 to 1",
    against=AGAINST,
    cpu=at_least(200),
    signed=False,
)
@row(
    "table1-standardised",
    what="the same with standardised inputs: in the first layer keys have both signs, and sums cannot give magnitudes",
    against=AGAINST,
    cpu=at_least(200),
    signed=True,
    why="No sum of keys gives a sum of absolute values where signs differ, so the first layer needs the product "
    "of 10,000 queries with each of its 60,000 distinct keys: 0.94 TFLOP, which at the rate of the best product "
    "(row `totals-128`) take 5.1 of the 5.6 s. Products in bfloat16 or int8 would be faster, but no bound on their "
    "error makes the sum of magnitudes exact: every single one counts, and none can be left out.",
)
def table_1(bench: Bench, signed: bool) -> Measured:
    patterns = bench.size(384_000, 2560)
    pool = bench.size(60_000, 640)  # the same images in every epoch
    wells = [Well(784, signed=True, pool=pool), Well(784, signed=False, pool=pool)]
    folder = store(bench, patterns, *wells, Well(800, signed=False), Well(800, signed=False))
    names = ["layers.0" if signed else "layers.1", "layers.2", "layers.3"]
    count = bench.size(10_000, 16)
    asked = {name: torch.randn(count, 784 if name == names[0] else 800).relu_() for name in names}
    if signed:
        asked[names[0]] = torch.randn_like(asked[names[0]])
    steps = bench.size(24, 4)
    keys = {name: stored_keys(folder, name)[: steps * BATCH] for name in names}
    memory = dualform.open(folder)
    labels = torch.from_numpy(memory.patterns(names[0], columns=["label"])["label"].to_numpy().copy())

    def ours() -> object:
        again = dualform.open(folder)  # the sums are read from the folder's cache
        for name in names:
            winners = again.attend(queries={name: asked[name]}).vote(by="label", of="magnitude")
        return winners

    def theirs() -> None:
        for name in names:
            authors(keys[name], asked[name], labels)

    for name in names:
        part = memory.at(step=steps).attend(queries={name: asked[name][:16]})[name].totals("label", of="magnitude")
        expected = authors(keys[name], asked[name][:16], labels)
        torch.testing.assert_close(part.values.double(), expected.double(), rtol=1e-4, atol=1e-2)
    if signed:  # minutes each
        pairs = alternate(ours, theirs, least=1, most=1, warm=0)
    else:
        pairs = bench.alternate(ours, theirs, budget=60, least=5)  # the first fills the cache
    scale = patterns / (steps * BATCH)
    low, high = pairs.spread
    return Measured(
        scale / pairs.ratio,
        (scale / high, scale / low),
        {**pairs.detail("Table 1", f"{steps} steps of the procedure"), "scaled by": scale},
    )


def authors(keys: Tensor, queries: Tensor, labels: Tensor) -> Tensor:
    """Return the totals of magnitude per class, (Q, C), as the authors' published code adds them up."""
    totals = torch.zeros(len(queries), CLASSES)
    for start in range(0, len(keys), BATCH):
        magnitude = torch.abs(queries @ keys[start : start + BATCH].T)  # (Q, B)
        for label in range(CLASSES):
            mask = labels[start : start + BATCH] == label
            totals[:, label] += (magnitude * mask).sum(dim=1)
    return totals
