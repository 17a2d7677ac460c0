"""How many bytes a pattern takes, and what that costs in exactness."""

from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

import dualform
from benchmarks.bench import Bench
from benchmarks.rows import Measured, at_most, row
from benchmarks.stores import MNIST, batches, bytes_of, classifier, images, train

FLOAT32 = 4 * sum(a + b for a, b in pairwise(MNIST))  # bytes of a pattern's keys and values


class Recordings(NamedTuple):
    """One MNIST run recorded twice: whole in float16, and its first `part` steps in float32."""

    compact: Path
    exact: Path
    model: nn.Module
    inputs: Tensor
    part: int
    patterns: int
    source: str


def _recordings(bench: Bench) -> Recordings:
    """Record one MNIST run in float16, and its beginning in float32, the same training to the bit."""
    inputs, labels, source = images(bench)
    order = batches(len(inputs), bench.size(3000, 16))
    part = bench.size(300, 8)
    folders = bench.new_folder(), bench.new_folder()
    dtypes: tuple[Literal["float16"], None] = ("float16", None)
    for folder, dtype, steps in zip(folders, dtypes, (len(order), part), strict=True):
        model, optimizer = classifier(MNIST, torch.device("cpu"))
        with dualform.record(model, optimizer, folder, dtype=dtype) as recorder:
            train(model, optimizer, inputs, labels, order[:steps], recorder=recorder)
    return Recordings(*folders, model, inputs, part, sum(len(rows) for rows in order), source)


@row(
    "size",
    what="bytes per pattern of an MNIST single run, float16, identical input keys stored once, every file counted",
    against="float32 keys and values of all layers",
    cpu=at_most(0.45),
)
def size(bench: Bench) -> Measured:
    recordings = bench.once("recordings", lambda: _recordings(bench))
    stored = bytes_of(recordings.compact) / recordings.patterns
    counts = {"bytes per pattern": stored, "in float32": FLOAT32}
    return Measured(stored / FLOAT32, None, {**counts, "inputs": recordings.source})


@row(
    "size-error",
    what="largest error of a total in that run, relative to the largest total of its query",
    against="the same training recorded in float32 (its first 300 steps)",
    unit="plain",
    cpu=at_most(1e-3),
)
def size_error(bench: Bench) -> Measured:
    recordings = bench.once("recordings", lambda: _recordings(bench))
    model, tests = recordings.model, recordings.inputs[:64]
    ours = dualform.open(recordings.compact).at(step=recordings.part).attend(model, tests, other_model=True)
    theirs = dualform.open(recordings.exact).attend(model, tests, other_model=True)
    errors = {}
    for name in ours:
        for of in ("attention", "magnitude", "contribution"):
            a, b = (spotlight[name].totals("label", of=of).values.double() for spotlight in (ours, theirs))
            largest = b.abs().flatten(1).amax(dim=1)
            errors[f"{name}, {of}"] = float(((a - b).abs().flatten(1).amax(dim=1) / largest).max())
    return Measured(max(errors.values()), None, errors)
