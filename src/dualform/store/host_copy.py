"""The way of a step's patterns from a GPU to the CPU's memory, without waiting: packed, and copied at once.

One kernel packs, one copy on a stream of its own fills a part of a ring of page-locked memory, and whoever looks at the
tensors waits for that copy alone. Where the ring is full, the copy goes to memory of its own, and is waited for.
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.recording.packing import pack, unpack

RING_BYTES = 256 << 20  # page-locked memory
ALIGNMENT_BYTES = 64


@dataclass(slots=True)
class RingPart:
    """A part of the ring."""

    start: int
    stop: int
    free: bool = False


class Ring:
    """Parts of one buffer, taken one after the other and given back in about the same order."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self._lock = threading.Lock()
        self._taken: deque[RingPart] = deque()

    def take(self, size: int) -> RingPart | None:
        """Return a part of this size; nothing where there is no room."""
        size = max(ALIGNMENT_BYTES, math.ceil(size / ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
        with self._lock:
            while self._taken and self._taken[0].free:
                self._taken.popleft()
            start = self._taken[-1].stop if self._taken else 0
            oldest = self._taken[0].start if self._taken else self.buffer.numel()
            if not self._taken or start > oldest:  # free: to the end, and before the oldest
                if start + size > self.buffer.numel():
                    start, limit = 0, oldest if self._taken else self.buffer.numel()
                else:
                    limit = self.buffer.numel()
            else:
                limit = oldest
            if start + size > limit:
                return None
            part = RingPart(start, start + size)
            self._taken.append(part)
            return part

    def give(self, part: RingPart) -> None:
        """Give a part back."""
        part.free = True


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Tensors in the CPU's memory, or on their way there."""

    tensors: Sequence[Tensor]
    wait: Callable[[], object]  # returns when they have arrived
    release: Callable[[], object]  # says that nobody looks at them any more


def _nothing() -> None:
    pass


class RingTransfer:
    """Copies tensors of one GPU into a ring of page-locked memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._ring = Ring(torch.empty(RING_BYTES, dtype=torch.uint8, pin_memory=True))
        self._stream = torch.cuda.Stream(device)

    def copy(self, tensors: Sequence[Tensor]) -> HostCopy:
        """Start to copy tensors, all on the device; there is at least one."""
        packed = pack(tensors)
        part = self._ring.take(packed.nbytes)
        if part is None:
            return HostCopy(unpack(packed.cpu(), tensors), _nothing, _nothing)
        host = self._ring.buffer[part.start : part.start + packed.nbytes].view(packed.dtype)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            host.copy_(packed, non_blocking=True)
            done = self._stream.record_event()
        packed.record_stream(self._stream)
        return HostCopy(unpack(host, tensors), done.synchronize, lambda: self._ring.give(part))


class HostCopier:
    """Copies the tensors of a step to the CPU's memory, wherever they are."""

    def __init__(self) -> None:
        self._ring: RingTransfer | None = None  # of the GPU that the last step was on

    def copy(self, tensors: Sequence[Tensor]) -> HostCopy:
        """Return tensors in the CPU's memory: themselves where they are there, else copies that may be on their way."""
        devices = {tensor.device for tensor in tensors}
        if all(device.type == "cpu" for device in devices):
            return HostCopy(tensors, _nothing, _nothing)
        device = devices.pop()
        if devices or device.type != "cuda":
            return HostCopy([tensor.cpu() for tensor in tensors], _nothing, _nothing)
        if self._ring is None or self._ring.device != device:
            self._ring = RingTransfer(device)
        return self._ring.copy(tensors)
