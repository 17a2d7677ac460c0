"""The way of a step's tensors from a GPU: tensors that are here stay, others are copied, small ones together."""

import torch

from dualform.store.host_copy import MAX_PACKED_BYTES, HostCopier, split_by_size


def test_tensors_in_the_memory_of_the_cpu_are_not_copied() -> None:
    tensors = [torch.randn(3), torch.arange(4)]
    copy = HostCopier().copy(tensors)
    copy.wait()
    assert all(found is given for found, given in zip(copy.tensors, tensors, strict=True))
    assert HostCopier().copy([]).tensors == []


def test_only_small_tensors_are_packed() -> None:
    tensors = [torch.empty(size, dtype=torch.uint8) for size in (1, MAX_PACKED_BYTES + 1, MAX_PACKED_BYTES, 0)]
    assert split_by_size(tensors) == ([1], [0, 2, 3])


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
