"""A pool of memory for copies of keys and values: memory that no tensor refers to any more is copied into again.

The copies of a step are as large as those of the step before, and memory that is new to a process costs more than
copying into it. Nobody gives memory back by hand: it returns to the pool when the last tensor that refers to it is
gone, on whichever thread that happens. So a sink may keep what it was given for as long as it likes.

No lock is taken: the end of a tensor may come in the middle of any function here, and so may a Ctrl-C.
"""

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

MAX_FREE_BYTES = 512 << 20
"""How much memory that is free the pool keeps when a copy is made; what was lent may return in addition later."""

BLOCK_BYTES = 4 << 20
"""At most how much memory is allocated at once."""

MIN_POOLED_BYTES = 1 << 16
"""Bytes of a copy below which it gets memory of its own: the allocator has such memory at hand, and lending it from the
pool takes longer than copying into it."""

Kind = tuple[torch.Size, torch.dtype]


class _Loan(weakref.ref[npt.NDArray[Any]]):
    """Watches the array that the tensors of one copy refer to, and holds the memory behind it."""

    __slots__ = ("kind", "memory")

    kind: Kind
    memory: Tensor


class BufferPool:
    """Memory to copy into, by the shape and type of what it holds."""

    def __init__(self) -> None:
        self._loans: dict[int, _Loan] = {}  # id -> a loan whose tensors are alive
        self._returned: deque[_Loan] = deque()  # loans whose tensors are gone, on any thread
        self._free: dict[Kind, list[Tensor]] = {}  # memory to copy into
        self._free_bytes = 0
        self._allocated: dict[Kind, int] = {}  # number of buffers

    def copy(self, rows: Tensor) -> Tensor:
        """Return a contiguous copy of a tensor on its own device; only large copies in the CPU's memory are pooled."""
        if rows.nbytes < MIN_POOLED_BYTES or rows.device.type != "cpu":
            return rows.clone(memory_format=torch.contiguous_format)
        return self._take((rows.shape, rows.dtype)).copy_(rows)

    def empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return a contiguous tensor of a shape, not filled, on the device and in the dtype of another tensor."""
        kind = torch.Size(shape), like.dtype
        if like.device.type != "cpu" or kind[0].numel() * like.dtype.itemsize < MIN_POOLED_BYTES:
            return like.new_empty(shape)
        return self._take(kind)

    def _take(self, kind: Kind) -> Tensor:
        """Return a tensor over memory of the pool."""
        if self._returned:
            self._sort_returned()
        try:
            memory = self._free[kind].pop()
            self._free_bytes -= memory.nbytes
        except (KeyError, IndexError):
            memory = self._allocate(kind)
        lent = self._lend(kind, memory)
        return lent if lent.dtype is kind[1] else lent.view(kind[1])

    def _allocate(self, kind: Kind) -> Tensor:
        """Return new memory, and keep as much again of the same kind free as was allocated of it before.

        Memory that is allocated together lies together: between the small and short-lived tensors of a training single
        buffers would leave gaps that nothing fits in. Free memory that nobody has written to costs nothing yet.
        """
        shape, dtype = kind
        before = self._allocated.get(kind, 0)
        size = shape.numel() * dtype.itemsize
        count = max(1, min(before, BLOCK_BYTES // size))
        self._allocated[kind] = before + count
        # numpy knows no bfloat16.
        block = torch.empty(count, *shape, dtype=torch.int16 if dtype is torch.bfloat16 else dtype)
        self._free.setdefault(kind, []).extend(block[1:])
        self._free_bytes += (count - 1) * size
        return block[0]

    def _lend(self, kind: Kind, memory: Tensor) -> Tensor:
        """Return a tensor over some memory, which returns here when that tensor and all views of it are gone.

        A tensor over a numpy array keeps the array alive through its storage, which all its views share; so the end of
        the array is the end of them all.
        """
        array: npt.NDArray[Any] = memory.numpy()
        loan = _Loan(array, self._end_loan)
        loan.kind, loan.memory = kind, memory
        self._loans[id(loan)] = loan
        return torch.from_numpy(array)

    def _end_loan(self, loan: Any) -> None:
        self._loans.pop(id(loan), None)
        self._returned.append(loan)

    def _sort_returned(self) -> None:
        """Make memory that has returned ready to be copied into, up to the bound."""
        while self._returned:
            try:
                loan = self._returned.popleft()
            except IndexError:  # another thread was faster
                return
            size = loan.memory.nbytes
            if self._free_bytes + size <= MAX_FREE_BYTES:
                self._free.setdefault(loan.kind, []).append(loan.memory)
                self._free_bytes += size


_lender = threading.local()  # pool: the pool that the calling thread's `new_rows` takes memory from; none: new memory


class lending:  # a function with a generator would cost as much as what it is put around
    """Let `new_rows` take memory from a pool while the block lasts, on the calling thread."""

    __slots__ = ("_before", "_pool")

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool

    def __enter__(self) -> None:
        self._before = getattr(_lender, "pool", None)
        _lender.pool = self._pool

    def __exit__(self, *_: object) -> None:
        _lender.pool = self._before


def new_rows(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return a contiguous tensor to be filled with keys or values, or with what they are made of.

    While training is recorded it is memory of the recording's pool, elsewhere new memory.

    Args:
        shape: the tensor's.
        like: a tensor of the same device and dtype.
    """
    pool: BufferPool | None = getattr(_lender, "pool", None)
    return like.new_empty(shape) if pool is None else pool.empty(shape, like)


def as_rows(tensor: Tensor, width: int) -> Tensor:
    """Return a tensor (..., width) as rows (T, width): a view where that can be, else a copy."""
    if tensor.dim() == 2:
        return tensor
    if tensor.is_contiguous():
        return tensor.view(-1, width)
    rows = new_rows((tensor.shape[:-1].numel(), width), tensor)
    rows.view(tensor.shape).copy_(tensor)
    return rows
