"""Makes the exchanges between processes that shares of divided weights need, many of them at once.

All are made of one all-to-all exchange of numbers, which every backend has and which takes parts of any sizes; a sum
over processes is made by each process for its own rows, in the order of ranks. docs/distributed.md has what this was
measured against.
"""

from collections.abc import Sequence

import torch

from dualform.identity.families.divided_fold import Exchange
from dualform.recording.agreement import JointWork

EXCHANGED_BYTES = 64 << 20
"""Bytes that are exchanged together; one exchange may be larger."""


def make_exchanges(work: JointWork, exchanges: Sequence[Exchange]) -> None:
    """Make exchanges that every process asks for, in the same order; none where preparing it failed in any."""
    for dtype in sorted({one.dtype for one in exchanges}, key=str):
        waiting: list[Exchange] = []
        size = 0
        for one in exchanges:
            if one.dtype != dtype:
                continue
            if waiting and size + one.nbytes > EXCHANGED_BYTES:
                _exchange(work, waiting)
                waiting, size = [], 0
            waiting.append(one)
            size += one.nbytes
        if waiting:
            _exchange(work, waiting)


def _exchange(work: JointWork, exchanges: Sequence[Exchange]) -> None:
    world = work.world
    outgoing = [one.outgoing() for one in exchanges]
    parts = [part for rank in range(world.size) for part in (one[rank] for one in outgoing)]
    sizes = [sum(len(one[rank]) for one in outgoing) for rank in range(world.size)]
    incoming = [one.incoming(world.rank) for one in exchanges]
    packed = torch.cat(parts)
    del outgoing, parts
    coming = [sum(one[rank] for one in incoming) for rank in range(world.size)]
    work.agree()
    found = world.exchange(packed, sizes, coming)
    pieces = [part.split([one[rank] for one in incoming]) for rank, part in enumerate(found)]
    for place, one in enumerate(exchanges):
        one.take([part[place] for part in pieces])
