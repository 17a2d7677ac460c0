"""The way of a step's tensors from a GPU to the CPU's memory, without waiting: large ones on a stream of their own.

Small tensors are packed by one kernel and copied together, large ones are copied as they are, all of them into
page-locked memory, which torch keeps and gives out again: after a few steps none is new. Whoever looks at the copies
waits for these copies alone. How many steps may be on their way is bounded by the queue they go to.

The tensors themselves are held until their copies have arrived. To let go of them earlier torch would have to be told
of the other stream (`record_stream`), and then notes an event for each when it is freed, which takes longer.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.recording.packing import PackedLayout

MAX_PACKED_BYTES = 1 << 20
"""Tensors up to this size are packed: starting one more copy takes longer than copying them twice on a GPU."""
MAX_BYTES_IN_LINE = 4 << 20
"""Bytes up to which a step's tensors are copied on the stream that made them: to begin and end another stream's part
takes the processor longer than this takes the GPU."""


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Tensors in the CPU's memory, or on their way there."""

    tensors: Sequence[Tensor]
    wait: Callable[[], object]  # returns when they have arrived


class _UnderWay:
    """Copies that are on their way, and the tensors that they are made of."""

    __slots__ = ("_done", "_sources")

    def __init__(self, done: torch.cuda.Event, sources: Sequence[Tensor]) -> None:
        self._done, self._sources = done, sources

    def let_go(self) -> bool:
        """Let go of what the copies are made of if they have arrived, and say whether they have."""
        if not self._done.query():
            return False
        self._sources = ()
        return True

    def __call__(self) -> None:
        """Return when the copies have arrived, and let go of what they were made of."""
        self._done.synchronize()
        self._sources = ()


def _nothing() -> None:
    pass


def is_elsewhere(tensor: Tensor) -> bool:
    """Say whether a tensor is in another memory than the CPU's, so that it has to be copied to be written."""
    return not tensor.is_cpu


class HostCopier:
    """Copies the tensors of a step to the CPU's memory, wherever they are."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._under_way: deque[_UnderWay] = deque()  # in the order in which they were begun

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
        while self._under_way and self._under_way[0].let_go():
            self._under_way.popleft()
        copy, under_way = copy_on(self._streams[device], tensors)
        self._under_way.append(under_way)
        return copy


def copy_on(stream: torch.cuda.Stream, tensors: Sequence[Tensor]) -> tuple[HostCopy, _UnderWay]:
    """Start to copy tensors of a stream's GPU on that stream, once the current stream has made them.

    Few bytes are copied on the current stream itself.
    """
    whole, small = split_by_size(tensors)
    packable = [tensors[i] for i in small]
    layout = PackedLayout(packable)
    packed = [layout.pack(packable)] if small else []
    sources = [*(tensors[i].contiguous() for i in whole), *packed]
    if sum(source.nbytes for source in sources) <= MAX_BYTES_IN_LINE:
        here = [_start(source) for source in sources]
        done = torch.cuda.current_stream(stream.device).record_event()
    else:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            here = [_start(source) for source in sources]
            done = stream.record_event()
    found = dict(zip(whole, here, strict=False))
    if small:
        found |= dict(zip(small, layout.unpack(here[-1]), strict=True))
    under_way = _UnderWay(done, sources)
    return HostCopy([found[i] for i in range(len(tensors))], under_way), under_way


def _start(source: Tensor) -> Tensor:
    """Return a copy in page-locked memory that is on its way."""
    target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    return target.copy_(source, non_blocking=True)


def split_by_size(tensors: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Return the places of tensors that are copied by themselves, and of those that are packed first."""
    large = [i for i, tensor in enumerate(tensors) if tensor.nbytes > MAX_PACKED_BYTES]
    return large, [i for i, tensor in enumerate(tensors) if tensor.nbytes <= MAX_PACKED_BYTES]
