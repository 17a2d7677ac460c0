"""Spare memory: copies of keys and values go into memory that earlier steps are done with.

A step's copies are as large as those of the step before, and memory that is new to a process costs more than copying
into it. Used on the training thread and, to give back, on the writer's.
"""

import threading
from collections.abc import Iterable

import torch
from torch import Tensor

KEPT = 512 << 20  # bytes of memory that wait to be used again


class Spares:
    """Memory to copy into, by the number and type of its elements."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._bytes = 0

    def copy(self, rows: Tensor) -> Tensor:
        """Return a copy of a tensor in its own device's memory, contiguous."""
        if rows.device.type != "cpu":
            return rows.clone(memory_format=torch.contiguous_format)
        with self._lock:
            free = self._free.get((rows.numel(), rows.dtype))
            spare = free.pop() if free else None
            if spare is not None:
                self._bytes -= spare.nbytes
        if spare is None:
            return rows.clone(memory_format=torch.contiguous_format)
        return spare.view(rows.shape).copy_(rows)

    def give(self, tensors: Iterable[Tensor]) -> None:
        """Take back memory that nobody looks at any more."""
        with self._lock:
            for tensor in tensors:
                whole = tensor.untyped_storage().nbytes() == tensor.nbytes
                if tensor.device.type == "cpu" and whole and self._bytes + tensor.nbytes <= KEPT:
                    flat = tensor.reshape(-1)
                    self._free.setdefault((flat.numel(), flat.dtype), []).append(flat)
                    self._bytes += flat.nbytes
