"""Several processes that train together, forked from the test's own, so that they start at once."""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dualform
from dualform.lazy import compute, parquet

PRELOADED = (dualform.record, dualform.open, parquet.write_table, compute.field, DistributedDataParallel)
"""Names whose modules are imported when they are first asked for: here once, and not in each process."""
PATIENCE_SECONDS = 60.0  # after which a process counts as hung


def run_together(folder: Path, work: Callable[[int], Any], size: int = 2) -> list[Any]:
    """Return what `work(rank)` returns in each of several processes of a group over gloo.

    An error of a process is raised here, with its traceback; a process that hangs is an error too.

    Args:
        folder: an empty one, where the processes find each other.
        work: what each process does.
        size: the number of processes.
    """
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # making the first optimizer imports most of torch
    context = multiprocessing.get_context("fork")
    answers = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        context.Process(target=_child, args=(folder, work, rank, size, answers[rank][1])) for rank in range(size)
    ]
    for process in processes:
        process.start()
    found: list[Any] = []
    try:
        for rank, (receiver, _) in enumerate(answers):
            if not receiver.poll(PATIENCE_SECONDS):
                raise AssertionError(f"process {rank} hangs")
            found.append(receiver.recv())
    finally:
        for process in processes:
            process.join(1.0)
            if process.is_alive():
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL)
    failures = [answer for answer, failed in found if failed]
    if failures:
        raise AssertionError("\n".join(failures))
    return [answer for answer, _ in found]


def _child(folder: Path, work: Callable[[int], Any], rank: int, size: int, answers: Any) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # accelerate warns where it is unset
    try:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=size)
        answers.send((work(rank), False))
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    except BaseException:
        answers.send((f"process {rank}: {traceback.format_exc()}", True))
    finally:
        os._exit(0)
