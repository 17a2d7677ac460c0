"""What a user would pick instead: dattri-llm's capture of the same training loop."""

import time
from collections.abc import Callable

import torch

import dualform
from benchmarks.bench import Bench
from benchmarks.rows import REPORTED, Measured, Skip, at_least, row
from benchmarks.stores import batches, classifier, train

DIGITS = (64, 128, 10)
SAMPLES = 1437


@row(
    "peer-sample",
    what="recording overhead, digits MLP 64-128-10, 300 steps, to disk, from opening to closing",
    against="the overhead of dattri-llm's per-sample capture on the same loop",
    cpu=at_least(4),
    recording_type="per_sample",
)
@row(
    "peer-batch",
    what="the same",
    against="the overhead of dattri-llm's per-batch capture on the same loop",
    cpu=REPORTED,
    recording_type="per_batch",
)
def peer(bench: Bench, recording_type: str) -> Measured:
    try:
        import dattri_llm as peer
    except ImportError as error:
        raise Skip("needs dattri-llm (benchmarks/peers.txt)") from error
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(SAMPLES, DIGITS[0], generator=generator)
    labels = torch.randint(DIGITS[-1], (SAMPLES,), generator=generator)
    order = batches(SAMPLES, bench.size(300, 4), 64)

    def plain() -> float:
        return train(*classifier(DIGITS, bench.device), inputs, labels, order, clip=None)

    def ours() -> float:
        model, optimizer = classifier(DIGITS, bench.device)
        with bench.scratch() as folder:
            start = time.perf_counter()
            with dualform.record(model, optimizer, folder) as recorder:
                train(model, optimizer, inputs, labels, order, recorder=recorder, clip=None)
            return time.perf_counter() - start

    def theirs() -> float:
        model, optimizer = classifier(DIGITS, bench.device)
        with bench.scratch() as folder:
            start = time.perf_counter()
            offload = peer.OffloadCallback(
                offload_interval=50,
                file_manager=peer.GradientStorageManager(str(folder)),
                recording_type=recording_type,
                async_write=True,
            )
            config = peer.HookManagerConfig(linear_io=peer.REGISTER_ALL)
            manager = peer.HookManager(model, config=config, callbacks=[offload])
            with manager.collect():
                train(model, optimizer, inputs, labels, order, clip=None)
            manager.remove()
            return time.perf_counter() - start

    base, mine, other = _in_turn(bench, plain, ours, theirs)
    overheads = min(mine) - min(base), min(other) - min(base)
    each = [(c - a) / (b - a) for a, b, c in zip(base, mine, other, strict=True)]
    detail = {"plain, s": min(base), "ours, s": min(mine), "theirs, s": min(other), "rounds": len(base)}
    return Measured(overheads[1] / overheads[0], (min(each), max(each)), detail)


def _in_turn(bench: Bench, *parts: Callable[[], float]) -> tuple[list[float], ...]:
    found: tuple[list[float], ...] = tuple([] for _ in parts)
    for turn in range(1 if bench.quick else 8):
        for part, times in zip(parts, found, strict=True):
            taken = part()
            if turn or bench.quick:  # the first warms up
                times.append(taken)
    return found
