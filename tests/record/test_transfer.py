"""Spare memory and the way from a GPU: nothing is used twice at a time, and what is packed comes out again."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualform.record import spares as spares_module
from dualform.record.probes import Accumulation, Probe, Trail, fetched
from dualform.record.spares import Spares
from dualform.record.transfer import Block, Ring, pack, unpack

DTYPES = [torch.float64, torch.float32, torch.float16, torch.int64, torch.uint8]


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), min_size=1, max_size=8))
def test_what_is_packed_comes_out_again(shapes: list[tuple[torch.dtype, list[int]]]) -> None:
    tensors = [torch.randn(shape).mul(50).abs().to(dtype) for dtype, shape in shapes]
    tensors[0] = tensors[0].T if tensors[0].dim() == 2 else tensors[0]
    for one, other in zip(unpack(pack(tensors), tensors), tensors, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_parts_of_the_ring_never_overlap() -> None:
    ring = Ring(torch.empty(10_000, dtype=torch.uint8))
    draw = random.Random(0)
    held: list[tuple[Block, set[int]]] = []
    refused = 0
    for _ in range(3000):
        if held and draw.random() < 0.5:
            ring.give(held.pop(0 if draw.random() < 0.8 else -1)[0])
            continue
        size = draw.randint(0, 3000)
        block = ring.take(size)
        if block is None:
            refused += 1
            continue
        mine = set(range(block.start, block.stop))
        assert len(mine) >= size
        assert block.stop <= 10_000
        assert all(not mine & other for _, other in held)
        held.append((block, mine))
    assert refused > 10, "it must have been full"


def test_a_ring_that_was_full_is_used_again_from_its_start() -> None:
    ring = Ring(torch.empty(1024, dtype=torch.uint8))
    first, second = ring.take(512), ring.take(512)
    assert first is not None
    assert second is not None
    assert ring.take(1) is None
    ring.give(first)
    third = ring.take(512)
    assert third is not None
    assert third.start == 0
    assert ring.take(1) is None
    ring.give(second)
    ring.give(third)
    assert ring.take(1024) is not None


def test_spare_memory_is_used_again_only_when_it_was_given_back() -> None:
    spares = Spares()
    rows = torch.randn(4, 5)
    one, two = spares.copy(rows), spares.copy(rows)
    assert torch.equal(one, rows)
    assert one.data_ptr() != two.data_ptr() != rows.data_ptr()
    spares.give([one])
    again = spares.copy(rows.T + 1)  # as many elements, of another shape, not contiguous
    assert again.data_ptr() == one.data_ptr()
    assert again.is_contiguous()
    assert torch.equal(again, rows.T + 1)
    assert torch.equal(two, rows)
    assert spares.copy(rows.double()).data_ptr() != one.data_ptr()
    spares.give([two[1:]])  # a part of a larger memory is nobody's to give
    assert spares.copy(rows[1:]).data_ptr() != two[1:].data_ptr()


def test_spare_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares_module, "KEPT", 100)
    spares = Spares()
    given_back = [torch.zeros(20), torch.zeros(20)]
    spares.give(given_back)
    places = {tensor.data_ptr() for tensor in given_back}
    taken = [spares.copy(torch.ones(20)) for _ in range(2)]
    assert sum(tensor.data_ptr() in places for tensor in taken) == 1


def test_probes_are_fetched_as_they_are() -> None:
    """What a GPU's probes go through; here nothing has to move."""

    def probe(norm: bool) -> Probe:
        return Probe(torch.randn(3, 2), torch.randn(()) if norm else None)

    first = Accumulation(0, None, probe(True), torch.randn(3, 2), [lambda: 1.0])
    second = Accumulation(1, probe(False), probe(True), torch.randn(3, 2), [], coarse=True)
    seen = [(Trail(4, [first, second]), probe(True)), (Trail(1), None)]
    assert fetched(seen) is seen
