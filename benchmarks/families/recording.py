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
from benchmarks.timing import Pairs, timed_pairs

LOOP = "recording overhead in the loop, MNIST network 784-800-800-10, batch 128, keys and values, to disk"


@row(
    "recording",
    what=LOOP,
    against="the same loop without recording",
    unit="percent",
    cpu=at_most(0.15),
    cuda=at_most(0.30),
    why={
        "cpu": "after the first 20 steps recording adds 1.6 ms of processor time to the training thread's 13 (one "
        "thread, by function): copies of keys and values 0.46, reading samples of gradients and parameters before the "
        "step 0.45, hooks of the backward 0.22, of the forward 0.17, after the step 0.20. A full check adds 1.5: in "
        "each of the first 20 steps, then in one of sixteen; a trial of a few rows, after 1, 3, 7, ... steps, takes 6, "
        "and one of a whole batch, at the first step and after 127, 27. The writer's threads take 1.4 beside "
        "it on two cores: 0.6 to copy, sum and write, 0.45 to look keys up among "
        "earlier ones and find their range, the rest for tables and for publishing.",
        "cuda": "Python: a step takes 1.0 ms, nearly all of it launching kernels, recording adds 2.3 to 2.7 without "
        "a disk. A profile gives 1.7 before the step (0.9 to take samples, norms and their copy, 0.6 to read the step "
        "before, 0.2 to compare parameters), 0.5 in the hooks of the backward, 0.3 in those of the forward; twelve "
        "samples are six small products and six copies, 36 and 16 microseconds of launching each. With a disk the "
        "copies to page-locked memory add 0.9, and the writer's Python waits for the same interpreter.",
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

    def plain() -> float:
        return train(*classifier(MNIST, bench.device), inputs, labels, order)

    def recorded() -> float:
        model, optimizer = classifier(MNIST, bench.device)
        with bench.scratch() as folder:
            begin = time.perf_counter()
            with dualform.record(model, optimizer, folder, dtype=dtype) as recorder:
                loop = train(model, optimizer, inputs, labels, order, recorder=recorder)
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
