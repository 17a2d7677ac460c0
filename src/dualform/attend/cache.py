"""Derived sums that are worth keeping: in memory for this process, on disk for the next.

A cached tensor is named by what it depends on: the published shards, the view, the layer, the grouping. The folder may
be deleted at any time, and nothing goes wrong where it cannot be written.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import safetensors.torch
import xxhash
from torch import Tensor

from dualform.store.format import publish_tensors
from dualform.store.reader import Run

BUDGET = 256 << 20  # bytes; a larger answer is computed each time


@dataclass(frozen=True, slots=True)
class Cache:
    """The cache of one opened run."""

    run: Run
    here: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def get(
        self, what: object, compute: Callable[[], dict[str, Tensor]], *, budget: int | None = None
    ) -> dict[str, Tensor]:
        """Return the tensors named by `what` (anything with a faithful repr), computing them if need be."""
        published = [(s.entry.index, s.entry.stop, sorted(s.entry.files.items())) for s in self.run.shards]
        name = xxhash.xxh3_128_hexdigest(repr((published, what)).encode())
        if name not in self.here:
            path = self.run.folder / "cache" / f"{name}.safetensors"
            found: dict[str, Tensor] | None = None
            if path.is_file():
                with contextlib.suppress(OSError, safetensors.SafetensorError):
                    found = safetensors.torch.load_file(path)
            if found is None:
                found = {key: tensor.cpu().contiguous() for key, tensor in compute().items()}
                if sum(tensor.nbytes for tensor in found.values()) > (BUDGET if budget is None else budget):
                    return found
                with contextlib.suppress(OSError):
                    publish_tensors(path, found)
            self.here[name] = found
        return self.here[name]
