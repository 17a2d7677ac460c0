"""Many small tensors as one: packed to go between devices in a single copy, and unpacked on the other side."""

from collections.abc import Sequence

import torch
from torch import Tensor


class PackedLayout:
    """Where tensors lie when they are packed: those of one dtype together, dtypes of wide elements first.

    So each one lies where its elements may.
    """

    __slots__ = ("_groups", "_shapes")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Lay tensors out."""
        groups: dict[torch.dtype, list[int]] = {}
        for i, tensor in enumerate(tensors):
            groups.setdefault(tensor.dtype, []).append(i)
        self._groups = sorted(groups.items(), key=lambda group: -group[0].itemsize)
        self._shapes = [tensor.shape for tensor in tensors]

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return all elements of the tensors; their bytes where types differ."""
        parts = [torch.cat([tensors[i].reshape(-1) for i in places]) for _, places in self._groups]
        return parts[0] if len(parts) == 1 else torch.cat([part.view(torch.uint8) for part in parts])

    def unpack(self, packed: Tensor) -> list[Tensor]:
        """Return the tensors that were packed."""
        found: list[Tensor] = [packed] * len(self._shapes)
        start = 0
        for dtype, places in self._groups:
            counts = [self._shapes[i].numel() for i in places]
            group = packed
            if len(self._groups) > 1:
                stop = start + sum(counts) * dtype.itemsize
                group, start = packed[start:stop].view(dtype), stop
            for i, part in zip(places, group.split(counts), strict=True):
                found[i] = part if len(self._shapes[i]) == 1 else part.view(self._shapes[i])
        return found


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return all elements of tensors, of which there is at least one; their bytes where types differ."""
    return PackedLayout(tensors).pack(tensors)


def unpack(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that were packed.

    >>> one, two = torch.arange(3), torch.ones(2, 2)
    >>> unpack(pack([two, one]), [two, one])
    [tensor([[1., 1.],
            [1., 1.]]), tensor([0, 1, 2])]
    """
    return PackedLayout(like).unpack(packed)


class NumbersUnderWay:
    """Small tensors on their way from a GPU to the CPU's memory. Nobody waits before the numbers are asked for."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Start to copy tensors, all on one device."""
        self._layout = PackedLayout(tensors)
        self._here = self._layout.pack(tensors) if tensors else torch.empty(0)
        self._arrived: torch.cuda.Event | None = None
        if self._here.is_cuda:
            packed, self._here = self._here, torch.empty(self._here.shape, dtype=self._here.dtype, pin_memory=True)
            self._here.copy_(packed, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> list[Tensor]:
        """Return the tensors in the CPU's memory, waiting until they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._layout.unpack(self._here)
