"""What recording a recurrent layer adds to a training step. Patterns go to a sink that drops them: no disk here."""

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.bench import Bench
from benchmarks.rows import Measured, at_most, row
from benchmarks.timing import timed_pairs, wait
from dualform.recording.recorder import Recorder
from dualform.recording.watch import What

AGAINST = "the same step without recording"
WHY = (
    "every step here is the first of a recording, and is checked in full. The errors at a GRU's gates are computed "
    "again, one time step after the other; those of an LSTM are read out of its kernel's workspace, in a dozen passes "
    "over arrays that no cache holds."
)


class DroppingSink:
    """A sink that drops everything."""

    dtype = None

    def open(self, start: Any) -> int:
        """Begin at step 0."""
        return 0

    def updates(self) -> Mapping[str, int]:
        """Hold no updates."""
        return {}

    def check(self, binding: Any) -> None:
        """Accept every column."""

    def call(self, record: Any) -> None:
        """Drop patterns."""

    def before_step(self, prepared: Any) -> None:
        """Look at nothing."""

    def step(self, facts: Any) -> None:
        """Drop a step."""

    def discard(self, backwards: Any) -> None:
        """Hold nothing to let go of."""

    def state(self) -> Mapping[str, Any]:
        """Return nothing."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take nothing."""

    def attach(self, files: Any) -> None:
        """Drop files."""

    def flush(self, snapshot: Callable[[], dict[str, Tensor]]) -> None:
        """Publish nothing."""

    def close(self, final: Mapping[str, Tensor]) -> None:
        """Forget everything."""

    def close_without_final(self, reason: str) -> None:
        """Forget everything."""

    def find_step(self, parameters: Mapping[str, Tensor]) -> int | None:
        """Find no step: none is kept."""
        return None

    def abandon(self) -> None:
        """Forget everything."""


@row(
    "recurrent-lstm-200",
    what="recording overhead, LSTM of the WikiText-2 study (200 units, batch 128), without the disk",
    against=AGAINST,
    unit="percent",
    cpu=at_most(0.5),
    why=WHY,
    shape=(nn.LSTM, 200, 200, 100, 128),
)
@row(
    "recurrent-lstm-256",
    what="the same, LSTM of 256 units, batch 64",
    against=AGAINST,
    unit="percent",
    cpu=at_most(0.5),
    why=WHY,
    shape=(nn.LSTM, 64, 256, 100, 64),
)
@row(
    "recurrent-gru-256",
    what="the same, GRU of 256 units, batch 64",
    against=AGAINST,
    unit="percent",
    cpu=at_most(0.5),
    why=WHY,
    shape=(nn.GRU, 64, 256, 100, 64),
)
def recurrent(bench: Bench, shape: tuple[Callable[..., nn.Module], int, int, int, int]) -> Measured:
    make, d_in, units, length, rows = shape
    torch.manual_seed(0)
    layer = make(d_in, units).to(bench.device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-4)
    inputs = torch.randn(bench.size(length, 3), rows, d_in, device=bench.device)

    def step(layers: Mapping[str, What] | None) -> float:
        with Recorder(layer, optimizer, DroppingSink(), layers=layers) if layers else contextlib.nullcontext():
            wait(bench.device)
            start = time.perf_counter()
            optimizer.zero_grad()
            layer(inputs)[0].square().mean().backward()
            optimizer.step()
            wait(bench.device)
            return time.perf_counter() - start

    times = (0, 1, 1, 0) if bench.quick else (10, 5, 25, 1)
    both = timed_pairs(lambda: step({"*": "keys+values"}), lambda: step(None), *times)
    keys = timed_pairs(lambda: step({"*": "keys"}), lambda: step(None), *times)
    low, high = both.spread
    return Measured(both.ratio - 1, (low - 1, high - 1), {**both.detail("step"), "keys only, overhead": keys.ratio - 1})
