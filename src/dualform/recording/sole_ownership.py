"""Keys and values that need no copy: those in memory that nobody but the recording refers to any more.

When a layer's gradient is accumulated, autograd has let go of the error at the layer's output, and often of its input.
Memory that the recording alone still refers to cannot be written to by anybody else, and is kept as it is. The question
is asked at the moment at which a copy would be made: a write before that moment would be in the copy as well.

Only tensors that the recording made itself (by `detach`) may be asked about. torch counts the tensors that refer to
some memory, and not who refers to a tensor: of a tensor that autograd or the user made, others may have the very same.
"""

import functools
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_use_count = getattr(torch._C, "_storage_Use_Count", None)  # None: this torch does not tell, and everything is copied


def is_owned_alone(rows: Tensor, own: Iterable[Any]) -> bool:
    """Say whether nobody else than the caller can read or write the memory of some rows, now or later.

    Memory that numpy, a file or another process knows of, or that has room for more than these rows, is not owned.

    Args:
        rows: a tensor that the caller made, and that nobody else has.
        own: other tensors that the caller made and that nobody else has; some may lie in the memory of the rows.
    """
    if _use_count is None or type(rows) is not Tensor or not (rows.is_cpu or rows.is_cuda):
        return False
    if not rows.is_contiguous():
        return False
    storage = rows.untyped_storage()
    if storage.nbytes() != rows.nbytes or not storage.resizable():  # torch resizes only what it allocated itself
        return False
    if rows.is_cpu and storage.is_shared():
        return False
    place = storage._cdata
    mine: dict[int, Tensor] = {}
    for tensor in (rows, *own):
        if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata == place:
            mine[id(tensor)] = tensor
            base = tensor._base
            if base is not None:
                mine[id(base)] = base
    holders, names = _count_holders(storage)
    holders_of_one, names_of_one = _of_one_tensor()
    return holders == holders_of_one + len(mine) - 1 and names <= names_of_one


def _count_holders(storage: torch.UntypedStorage) -> tuple[int, int]:
    """Return how many tensors, and objects of Python's, refer to a storage, and how many names that Python object has.

    Python keeps one object for a storage: everybody who asks a tensor for its storage has the same one. Both counts
    include the caller's own; `_of_one_tensor` says how much that is.
    """
    assert _use_count is not None, "nothing is owned where torch does not tell who holds it"
    return _use_count(storage._cdata), sys.getrefcount(storage)


@functools.cache
def _of_one_tensor() -> tuple[int, int]:
    """Return what `_count_holders` says of the storage of a tensor that nobody else holds; it depends on torch."""
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    return _count_holders(storage)
