"""The way of a step's patterns from a GPU: no two parts of the ring overlap, and tensors that are here stay."""

import random

import torch

from dualform.store.host_copy import HostCopier, Ring, RingPart


def test_parts_of_the_ring_never_overlap() -> None:
    ring = Ring(torch.empty(10_000, dtype=torch.uint8))
    draw = random.Random(0)
    held: list[tuple[RingPart, set[int]]] = []
    refused = 0
    for _ in range(3000):
        if held and draw.random() < 0.5:
            ring.give(held.pop(0 if draw.random() < 0.8 else -1)[0])
            continue
        size = draw.randint(0, 3000)
        part = ring.take(size)
        if part is None:
            refused += 1
            continue
        mine = set(range(part.start, part.stop))
        assert len(mine) >= size
        assert part.stop <= 10_000
        assert all(not mine & other for _, other in held)
        held.append((part, mine))
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


def test_tensors_in_the_memory_of_the_cpu_are_not_copied() -> None:
    tensors = [torch.randn(3), torch.arange(4)]
    copy = HostCopier().copy(tensors)
    copy.wait()
    assert all(found is given for found, given in zip(copy.tensors, tensors, strict=True))
    copy.release()
    assert HostCopier().copy([]).tensors == []


def test_tensors_of_another_device_are_copied_one_by_one() -> None:
    """The meta device stands for one that is neither the CPU nor a GPU."""
    tensors = [torch.empty(3, device="meta"), torch.arange(4)]
    seen = []

    class Elsewhere(torch.Tensor):
        def cpu(self) -> torch.Tensor:  # type: ignore[override]
            seen.append(tuple(self.shape))
            return torch.zeros(self.shape)

    tensors[0] = tensors[0].as_subclass(Elsewhere)
    copy = HostCopier().copy(tensors)
    copy.wait()
    assert seen == [(3,)]
    assert torch.equal(copy.tensors[0], torch.zeros(3))
    assert torch.equal(copy.tensors[1], torch.arange(4))
