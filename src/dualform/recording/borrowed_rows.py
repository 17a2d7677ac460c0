"""Keys and values that are not copied while a backward runs: most are soon nobody else's.

What a layer took and the error at its output are held by autograd until the backward is over, and by nobody afterwards.
So a recording that holds them too becomes their only owner, and need not copy them. Until the end of the backward such
rows are *borrowed*; then each is found to be the recording's own, or is copied, before the user's program goes on.

Borrowed are large rows in the CPU's memory alone. On a GPU a copy costs little, and memory may be written to again
without a word to torch (CUDA graphs). The input of a whole model is copied at once: a program may fill it anew.
"""

import functools
import sys
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from dualform.errors import RefusedError
from dualform.recording.buffer_pool import MIN_POOLED_BYTES, BufferPool
from dualform.torch_modes import without_gradients

MIN_BORROWED_BYTES = MIN_POOLED_BYTES
"""Bytes of rows below which they are copied at once: finding out who holds them would take as long."""
_use_count = getattr(torch._C, "_storage_Use_Count", None)  # None: this torch does not tell, and everything is copied


class BorrowedRows(NamedTuple):
    """Keys or values that lie in memory that others may hold as well.

    Attributes:
        layer: the name of the layer.
        rows: the tensor that the sink has; it lies elsewhere once it had to be copied.
        version: how often torch had written to the memory when the rows were borrowed.
    """

    layer: str
    rows: Tensor
    version: int


def may_borrow(rows: Tensor) -> bool:
    """Say whether rows (T, d) may be borrowed, as far as their memory tells: torch's own, and filled by the rows.

    Memory that numpy knows of, or another process, is not resizable: they could write to it at any time.
    """
    if _use_count is None or type(rows) is not Tensor or not rows.is_cpu:
        return False
    if rows.nbytes < MIN_BORROWED_BYTES or not rows.is_contiguous():
        return False
    storage = rows.untyped_storage()
    return storage.nbytes() == rows.nbytes and storage.resizable()


@without_gradients
def settle_borrowed(borrowed: Iterable[BorrowedRows], held: Iterable[Tensor], pool: BufferPool) -> None:
    """Copy those of the borrowed rows that anybody else holds too.

    Args:
        borrowed: the rows of one backward, which is over, or which a step interrupts.
        held: all tensors of this backward that the recording itself holds, the borrowed rows among them. A tensor may
            come several times.
        pool: gives the memory for copies.
    """
    alone = _holders_of_one()
    own: dict[int, int] = {}  # a storage -> how many of the tensors that refer to it are the recording's
    for tensor in {id(tensor): tensor for tensor in held}.values():
        storage = tensor.untyped_storage()._cdata
        own[storage] = own.get(storage, 0) + 1
    for layer, rows, version in borrowed:
        storage = rows.untyped_storage()
        if rows._version != version or storage.nbytes() != rows.nbytes:
            raise RefusedError(
                f"Layer {layer!r} cannot be recorded exactly: its input, or the error at its output, was written to or "
                "freed while the backward that it belongs to was still running. Do that after the backward, or leave "
                "the layer out of layers=[...]."
            )
        holders, names = _count_holders(storage)
        if holders > own[storage._cdata] + alone[0] - 1 or names > alone[1]:
            rows.data = pool.copy(rows)  # `set_` would count as a write to the memory that is shared


def _count_holders(storage: torch.UntypedStorage) -> tuple[int, int]:
    """Return how many tensors, and objects of Python's, refer to a storage, and how many names that Python object has.

    Both count the caller's own; `_holders_of_one` says how much that is.
    """
    assert _use_count is not None, "nothing is borrowed where torch does not tell who holds it"
    return _use_count(storage._cdata), sys.getrefcount(storage)


@functools.cache
def _holders_of_one() -> tuple[int, int]:
    """Return what `_count_holders` says of the storage of a tensor that nobody else holds; it depends on torch."""
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    return _count_holders(storage)
