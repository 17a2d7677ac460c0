"""Many small tensors as one: packed to go between devices in a single copy, and unpacked on the other side. Pure."""

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


def _alike(tensors: Sequence[Tensor]) -> bool:
    return all(tensor.dtype == tensors[0].dtype for tensor in tensors)


def _order(tensors: Sequence[Tensor]) -> list[int]:
    return sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())
