"""What recording a recurrent layer costs: the layer's own training step with and without it, in turn.

    python benchmarks/recurrent.py            # prints one table of ratios, writes nothing

Everything is measured but the disk: records go to a sink that drops them.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from dualform.record.recorder import Recorder

SHAPES = {
    "LSTM, WikiText-2 study": (nn.LSTM, 200, 200, 100, 128),
    "LSTM, 256 units": (nn.LSTM, 64, 256, 100, 64),
    "GRU, 256 units": (nn.GRU, 64, 256, 100, 64),
    "RNN, 256 units": (nn.RNN, 64, 256, 100, 64),
}
PAIRS = 9


class Nowhere:
    """A sink that drops everything."""

    dtype = None

    def open(self, start: Any) -> int:
        """Begin at step 0."""
        return 0

    def check(self, binding: Any) -> None:
        """Accept every column."""

    def write(self, record: Any) -> None:
        """Drop a step."""

    def flush(self, snapshot: Callable[[], dict[str, Tensor]]) -> None:
        """Publish nothing."""

    def close(self, final: Mapping[str, Tensor]) -> None:
        """Forget everything."""

    def abandon(self) -> None:
        """Forget everything."""


def timed(layer: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, layers: Any) -> float:
    """Return the seconds of one training step; `layers` says what is recorded, nothing for plain training."""
    recording = contextlib.nullcontext() if layers is None else Recorder(layer, optimizer, Nowhere(), layers=layers)
    with recording:
        start = time.perf_counter()
        optimizer.zero_grad()
        layer(inputs)[0].square().mean().backward()
        optimizer.step()
        return time.perf_counter() - start


def main() -> None:
    """Measure and print."""
    table = Table("layer", "plain, ms", "keys and values / plain", "keys only / plain")
    for name, (make, d_in, units, steps, rows) in SHAPES.items():
        torch.manual_seed(0)
        layer = make(d_in, units)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-4)
        inputs = torch.randn(steps, rows, d_in)
        ratios: dict[str, list[float]] = {"keys+values": [], "keys": []}
        plain = []
        for _ in range(PAIRS):
            for what, found in ratios.items():
                plain.append(timed(layer, optimizer, inputs, None))
                found.append(timed(layer, optimizer, inputs, {"*": what}) / plain[-1])
        both, keys = (f"{statistics.median(found):.2f}" for found in ratios.values())
        table.add_row(name, f"{1e3 * statistics.median(plain):.0f}", both, keys)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
