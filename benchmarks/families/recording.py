"""What recording adds to a training loop."""

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Literal

import torch

import dualform
from benchmarks.bench import Bench
from benchmarks.rows import REPORTED, Measured, at_most, row
from benchmarks.stores import MNIST, batches, classifier, images, train
from benchmarks.timing import Pairs, of_steps, timed_pairs

LOOP = "recording overhead in the loop, MNIST network 784-800-800-10, batch 128, keys and values, to disk"


@row(
    "recording",
    what=LOOP,
    against="the same loop without recording",
    unit="percent",
    cpu=at_most(0.15),
    cuda=at_most(0.30),
    why={
        "cpu": "what the training thread spends inside of the recorder is in the details: reading samples of gradients "
        "and parameters before and after the step, hooks, and in few steps full checks and trials of rows. The rest "
        "is the writer, which looks keys up, finds their range, copies, sums and writes on the second of two cores, "
        "which torch wants too: it splits large operations over both cores, and waits for the one that the writer has.",
        "cuda": "Python and launches: nearly all of a plain step is launching kernels, and recording launches as many "
        "again, for samples, norms and copies. With a disk the copies to page-locked memory come on top, and the "
        "writer's Python takes turns with the training's. What the training thread spends inside of the recorder is in "
        "the details.",
    },
)
@row(
    "recording-float16",
    what=f"{LOOP} in float16",
    against="the same loop without recording",
    unit="percent",
    cpu=REPORTED,
    cuda=REPORTED,
    dtype="float16",
)
def recording(bench: Bench, dtype: Literal["float16"] | None = None) -> Measured:
    return bench.once(("recording", dtype), lambda: _measure(bench, dtype))


@row(
    "recording-added",
    what="seconds that recording adds to a step of the MNIST loop, to disk",
    against="the same loop without recording",
    unit="seconds",
    cuda=at_most(0.001),
    why={"cuda": "see `recording`: Python, and launches of kernels."},
)
def recording_added(bench: Bench) -> Measured:
    found = recording(bench).detail
    added = float(found["recorded, ms per step"]) - float(found["plain, ms per step"])
    return Measured(added / 1e3, None, found)


def _measure(bench: Bench, dtype: Literal["float16"] | None) -> Measured:
    inputs, labels, source = images(bench)
    inputs = inputs.to(bench.device)
    order = batches(len(inputs), bench.size(500 if bench.device.type == "cpu" else 200, 3))  # 2 MB each
    whole: list[float] = []
    inside: list[float] = []

    def plain() -> float:
        return train(*classifier(MNIST, bench.device), inputs, labels, order)

    def recorded() -> float:
        model, optimizer = classifier(MNIST, bench.device)
        with bench.scratch() as folder:
            begin = time.perf_counter()
            with dualform.record(model, optimizer, folder, dtype=dtype) as recorder:
                loop = train(model, optimizer, inputs, labels, order, recorder=recorder, inside=inside)
            whole.append(time.perf_counter() - begin)
        return loop

    pairs = _pairs(bench, recorded, plain)
    low, high = pairs.spread
    closed = min(whole[-len(pairs.ours) :])  # not the one that warmed up
    plain_seconds = min(pairs.theirs)
    patterns = sum(len(rows) for rows in order)
    return Measured(
        pairs.ratio - 1,
        (low - 1, high - 1),
        {
            "inputs": source,
            "steps": len(order),
            "plain, ms per step": 1e3 * plain_seconds / len(order),
            "recorded, ms per step": 1e3 * min(pairs.ours) / len(order),
            "median of the pairs' overheads": pairs.median - 1,
            "overhead in processor time": pairs.processor - 1,
            **of_steps(inside),
            "overhead with opening and closing": closed / plain_seconds - 1,
            "opening, and draining at close, s": closed - min(pairs.ours),
            "MB per step in memory": 4e-6 * patterns / len(order) * sum(a + b for a, b in pairwise(MNIST)),
        },
    )


def _pairs(bench: Bench, ours: Callable[[], float], theirs: Callable[[], float]) -> Pairs:
    if bench.quick:
        return timed_pairs(ours, theirs, 0, 1, 1, 0)
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
    return timed_pairs(ours, theirs, 90, 3, 9, 1)
