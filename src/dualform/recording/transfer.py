"""From a GPU to the CPU's memory, without waiting: what a step leaves behind is packed and copied at once.

One kernel packs, one copy on a stream of its own fills a part of a ring of page-locked memory, and whoever looks at it
waits for that copy alone. Where the ring is full, the copy goes to memory of its own, and is waited for.
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RING = 256 << 20  # bytes of page-locked memory
ALIGNED = 64


@dataclass(slots=True)
class Block:
    """A part of the ring."""

    start: int
    stop: int
    free: bool = False


class Ring:
    """Parts of one buffer, taken one after the other and given back in about the same order."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self._lock = threading.Lock()
        self._taken: deque[Block] = deque()

    def take(self, size: int) -> Block | None:
        """Return a part of this size; nothing where there is no room."""
        size = max(ALIGNED, math.ceil(size / ALIGNED) * ALIGNED)
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
            block = Block(start, start + size)
            self._taken.append(block)
            return block

    def give(self, block: Block) -> None:
        """Give a part back."""
        block.free = True


@dataclass(frozen=True, slots=True)
class Brought:
    """Tensors in the CPU's memory, or on their way there."""

    tensors: Sequence[Tensor]
    wait: Callable[[], object]  # returns when they have arrived
    release: Callable[[], object]  # says that nobody looks at them any more


def _nothing() -> None:
    pass


class Transfer:
    """Brings tensors of a GPU to the CPU's memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._ring = Ring(torch.empty(RING, dtype=torch.uint8, pin_memory=True))
        self._stream = torch.cuda.Stream(device)

    def bring(self, tensors: Sequence[Tensor]) -> Brought:
        """Start to bring tensors, all on the device."""
        if not tensors:
            return Brought([], _nothing, _nothing)
        packed = pack(tensors)
        block = self._ring.take(packed.nbytes)
        if block is None:
            return Brought(unpack(packed.cpu(), tensors), _nothing, _nothing)
        host = self._ring.buffer[block.start : block.start + packed.nbytes].view(packed.dtype)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            host.copy_(packed, non_blocking=True)
            done = self._stream.record_event()
        packed.record_stream(self._stream)
        return Brought(unpack(host, tensors), done.synchronize, lambda: self._ring.give(block))


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return all elements of tensors; their bytes where types differ, those of wide elements first.

    So each one lies where its elements may.
    """
    if _alike(tensors):
        return torch.cat([tensor.reshape(-1) for tensor in tensors])
    return torch.cat([tensors[i].contiguous().reshape(-1).view(torch.uint8) for i in _order(tensors)])


def unpack(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that were packed.

    >>> one, two = torch.arange(3), torch.ones(2, 2)
    >>> unpack(pack([two, one]), [two, one])
    [tensor([[1., 1.],
            [1., 1.]]), tensor([0, 1, 2])]
    """
    if _alike(like):
        parts = packed.split([tensor.numel() for tensor in like])
        return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
    order = _order(like)
    parts = packed.split([like[i].nbytes for i in order])
    found = {i: part.view(like[i].dtype).view(like[i].shape) for i, part in zip(order, parts, strict=True)}
    return [found[i] for i in range(len(like))]


def _alike(tensors: Sequence[Tensor]) -> bool:
    return all(tensor.dtype == tensors[0].dtype for tensor in tensors)


def _order(tensors: Sequence[Tensor]) -> list[int]:
    return sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())
