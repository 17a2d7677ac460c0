"""Many small tensors as one: packed to go between devices in a single copy, and unpacked on the other side."""

from collections.abc import Sequence

import torch
from torch import Tensor


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


class NumbersUnderWay:
    """Small tensors on their way from a GPU to the CPU's memory. Nobody waits before the numbers are asked for."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Start to copy tensors, all on one device."""
        self._like = tensors
        self._here: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        if tensors and tensors[0].device.type == "cuda":
            packed = pack(tensors)
            self._here = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._here.copy_(packed, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
            self._like = [torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in tensors]

    def read(self) -> list[Tensor]:
        """Return the tensors in the CPU's memory, waiting until they have arrived."""
        if self._here is None or self._arrived is None:
            return [tensor.cpu() for tensor in self._like]
        self._arrived.synchronize()
        return unpack(self._here, self._like)


def _alike(tensors: Sequence[Tensor]) -> bool:
    return all(tensor.dtype == tensors[0].dtype for tensor in tensors)


def _order(tensors: Sequence[Tensor]) -> list[int]:
    return sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())
