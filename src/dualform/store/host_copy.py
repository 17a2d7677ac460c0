"""The way of a step's tensors from a GPU to the CPU's memory, without waiting: copied on a stream of their own.

Small tensors are packed by one kernel and copied together, large ones are copied as they are, all of them into
page-locked memory, which torch keeps and gives out again: after a few steps none is new. Whoever looks at the copies
waits for these copies alone. How many steps may be on their way is bounded by the queue they go to.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.recording.packing import pack, unpack

MAX_PACKED_BYTES = 1 << 20
"""Tensors up to this size are packed: starting one more copy takes longer than copying them twice on a GPU."""


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Tensors in the CPU's memory, or on their way there."""

    tensors: Sequence[Tensor]
    wait: Callable[[], object]  # returns when they have arrived


def _nothing() -> None:
    pass


def is_elsewhere(tensor: Tensor) -> bool:
    """Say whether a tensor is in another memory than the CPU's, so that it has to be copied to be written."""
    return not tensor.is_cpu


class HostCopier:
    """Copies the tensors of a step to the CPU's memory, wherever they are."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def copy(self, tensors: Sequence[Tensor]) -> HostCopy:
        """Return tensors in the CPU's memory: themselves where they are there, else copies that may be on their way."""
        if {tensor.is_cpu for tensor in tensors} <= {True}:
            return HostCopy(tensors, _nothing)
        devices = {tensor.device for tensor in tensors}
        device = devices.pop()
        if devices or device.type != "cuda":
            return HostCopy([tensor.cpu() for tensor in tensors], _nothing)
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return copy_on(self._streams[device], tensors)


def copy_on(stream: torch.cuda.Stream, tensors: Sequence[Tensor]) -> HostCopy:
    """Start to copy tensors of a stream's GPU on that stream, once the current stream has made them."""
    whole, small = split_by_size(tensors)
    packed = [pack([tensors[i] for i in small])] if small else []
    large = [tensors[i].contiguous() for i in whole]
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    here = []
    with torch.cuda.stream(stream):
        for source in (*large, *packed):
            target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            here.append(target.copy_(source, non_blocking=True))
            source.record_stream(stream)
        done = stream.record_event()
    found = dict(zip(whole, here, strict=False))
    if small:
        found |= dict(zip(small, unpack(here[-1], [tensors[i] for i in small]), strict=True))
    return HostCopy([found[i] for i in range(len(tensors))], done.synchronize)


def split_by_size(tensors: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Return the places of tensors that are copied by themselves, and of those that are packed first."""
    large = [i for i, tensor in enumerate(tensors) if tensor.nbytes > MAX_PACKED_BYTES]
    return large, [i for i, tensor in enumerate(tensors) if tensor.nbytes <= MAX_PACKED_BYTES]
