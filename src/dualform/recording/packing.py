"""Many small tensors as one: packed to go between devices in a single copy, and unpacked on the other side."""

from collections.abc import Sequence

import torch
from torch import Tensor


class PackedLayout:
    """Where tensors lie when they are packed: those of one dtype together, dtypes of wide elements first.

    So each one lies where its elements may.
    """

    __slots__ = ("_groups", "_members", "_shapes")

    def __init__(self, parts: Sequence[Tensor | Sequence[Tensor]]) -> None:
        """Lay tensors out.

        Args:
            parts: tensors; or several of one dtype, which are unpacked as one, with one axis.
        """
        groups: dict[torch.dtype, list[int]] = {}
        self._shapes: list[torch.Size] = []
        self._members: list[range] = []  # which tensors each part is made of
        count = 0
        for i, part in enumerate(parts):
            several = [part] if isinstance(part, Tensor) else part
            self._shapes.append(
                part.shape if isinstance(part, Tensor) else torch.Size([sum(tensor.numel() for tensor in part)])
            )
            self._members.append(range(count, count := count + len(several)))
            if several:
                groups.setdefault(several[0].dtype, []).append(i)
        self._groups = sorted(groups.items(), key=lambda group: -group[0].itemsize)

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return all elements of the tensors, part after part; their bytes where types differ."""
        flat = list(map(_flat, tensors))
        parts = [torch.cat([flat[i] for place in places for i in self._members[place]]) for _, places in self._groups]
        return parts[0] if len(parts) == 1 else torch.cat([part.view(torch.uint8) for part in parts])

    def unpack(self, packed: Tensor) -> list[Tensor]:
        """Return the tensors that were packed."""
        found: list[Tensor] = [packed[:0]] * len(self._shapes)
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


def _flat(tensor: Tensor) -> Tensor:
    """Return a tensor's elements on one axis. Most tensors that are packed have one, and are returned as they are."""
    return tensor if tensor.dim() == 1 else tensor.reshape(-1)


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

    def __init__(self, parts: Sequence[Tensor | Sequence[Tensor]]) -> None:
        """Start to copy tensors, all on one device.

        Args:
            parts: tensors; or several of one dtype, of which one tensor comes with the elements of all.
        """
        tensors = [tensor for part in parts for tensor in ([part] if isinstance(part, Tensor) else part)]
        self._layout = PackedLayout(parts)
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
