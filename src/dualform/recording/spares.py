"""Spare memory: copies of keys and values go into memory that earlier steps are done with.

A step's copies are as large as those of the step before, and memory that is new to a process costs more than copying
into it. Used on the training thread and, to give back, on the writer's.
"""

import threading
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

KEPT = 512 << 20  # bytes of memory that wait to be used again
MANY = 1 << 16  # copies that are out before those are forgotten that are gone


class Spares:
    """Memory to copy into, by the number and type of its elements. Only what was copied here is taken back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lent: dict[int, weakref.ref[Tensor]] = {}  # id -> a copy that is out
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
            copied = rows.clone(memory_format=torch.contiguous_format)
        else:
            copied = spare.view(rows.shape).copy_(rows)
        with self._lock:
            self._lent[id(copied)] = weakref.ref(copied)
        return copied

    def give(self, tensors: Iterable[Tensor]) -> None:
        """Take back copies that nobody looks at any more."""
        with self._lock:
            for tensor in tensors:
                lent = self._lent.pop(id(tensor), None)
                if lent is not None and lent() is tensor and self._bytes + tensor.nbytes <= KEPT:
                    flat = tensor.reshape(-1)
                    self._free.setdefault((flat.numel(), flat.dtype), []).append(flat)
                    self._bytes += flat.nbytes
            if len(self._lent) > MANY:  # copies of steps that never came to be
                self._lent = {key: lent for key, lent in self._lent.items() if lent() is not None}
