"""The process that `test_kill.py` kills: a whole recording, a step or two a shard.

Imported once by the fork server, so that each process starts in a few milliseconds.
"""

import contextlib
import time
from pathlib import Path

import torch

import dualform
import dualform.store.writer
from helpers.small import network, sgd, train

with contextlib.suppress(ImportError):
    import pandas  # noqa: F401 (pyarrow imports it with its first table)

STEPS = 40

torch.set_num_threads(1)
sgd(network())  # making the first optimizer imports most of torch


def record_all(path: Path, begin: float) -> None:
    """Wait for a moment of the monotonic clock, then record the whole run."""
    model = network()
    optimizer = sgd(model, momentum=0.0)  # without momentum a checkpoint is the parameters alone
    while time.monotonic() < begin:
        time.sleep(0.0005)
    with dualform.record(model, optimizer, path, shard_bytes=600) as recorder:
        train(model, optimizer, range(STEPS), recorder)
