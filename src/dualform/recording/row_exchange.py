"""Sums over processes of which each process gets its own rows, for the shares of weights that are divided by rows.

This is a reduce-scatter. It is made of an all-to-all exchange and a sum in each process, which every backend has, which
takes rows that do not divide evenly, and which adds in the same order every time; docs/distributed.md has what it was
measured against.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dualform.identity.families.divided_fold import RowSum
from dualform.recording.sharded_modules import own_rows
from dualform.recording.world import World

EXCHANGED_BYTES = 64 << 20
"""Bytes of whole tensors that a process makes for one exchange; one sum may be larger."""


def exchange_sums(world: World, sums: Sequence[RowSum]) -> None:
    """Make sums, and give this process's rows of them to whoever asked; every process asks for the same ones."""
    waiting: list[RowSum] = []
    size = 0
    for one in sums:
        if waiting and (size > EXCHANGED_BYTES or one.dtype != waiting[0].dtype):
            _exchange(world, waiting)
            waiting, size = [], 0
        waiting.append(one)
        size += torch.Size(one.shape).numel() * one.dtype.itemsize
    if waiting:
        _exchange(world, waiting)


def _exchange(world: World, sums: Sequence[RowSum]) -> None:
    parts = [one.make() for one in sums]
    outgoing: list[Tensor] = []
    sizes: list[int] = []
    for rank in range(world.size):
        mine = [part[:, own_rows(part.shape[1], rank, world.size)].reshape(-1) for part in parts]
        outgoing += mine
        sizes.append(sum(len(one) for one in mine))
    shapes = [(part.shape[0], -1, *part.shape[2:]) for part in parts]
    rows = [own_rows(part.shape[1], world.rank, world.size) for part in parts]
    packed = torch.cat(outgoing)
    del parts, outgoing
    found = world.exchange(packed, sizes).sum(0)
    places = [(rows_of.stop - rows_of.start) * _per_row(one.shape) for rows_of, one in zip(rows, sums, strict=True)]
    for one, shape, part, rows_of in zip(sums, shapes, found.split(places), rows, strict=True):
        one.take(part.view(shape[0], rows_of.stop - rows_of.start, *shape[2:]))


def _per_row(shape: Sequence[int]) -> int:
    return shape[0] * torch.Size(shape[2:]).numel()
