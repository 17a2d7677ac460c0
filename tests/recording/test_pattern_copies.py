"""Copies of keys and values: calls that are copied together have what each of them would have by itself."""

import pytest
import torch
from torch import Tensor, nn

from dualform.recording import pattern_copies
from dualform.recording.buffer_pool import BufferPool
from dualform.recording.hooks import Arrival, Call
from dualform.recording.pattern_copies import copy_patterns
from dualform.recording.watch import Watched, watch


def arrivals_of(layers: list[Watched], shapes: list[tuple[int, ...]]) -> tuple[list[Arrival], list[Tensor]]:
    """Return arrivals of calls of the layers in turn, the last call first, and the tensors that they refer to."""
    torch.manual_seed(0)
    found, tensors = [], []
    for number, shape in enumerate(shapes):
        inputs, error = torch.randn(*shape, 3), torch.randn(*shape, 4)
        layer = layers[number % len(layers)]
        found.append(Arrival(Call(layer, number, inputs, False, None, None), [error]))
        tensors += [inputs, error]
    return found[::-1], tensors


@pytest.mark.parametrize("keys_only", [False, True])
def test_joined_copies_are_those_of_each_call(keys_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleList([nn.Linear(3, 4), nn.Linear(3, 4)])
    layers = list(watch(model, {"*": "keys"} if keys_only else None))
    shapes: list[tuple[int, ...]] = [(2,), (1,), (2, 3), (0,), (5,), ()]
    together, tensors = arrivals_of(layers, shapes)
    copy_patterns(together, BufferPool())
    monkeypatch.setattr(pattern_copies, "MAX_JOINED_BYTES", -1)
    apart, _ = arrivals_of(layers, shapes)
    copy_patterns(apart, BufferPool())
    for tensor in tensors:
        tensor.fill_(float("nan"))  # the user's memory is used again
    for one, other in zip(together, apart, strict=True):
        assert one.accumulated
        assert one.keys is not None
        assert other.keys is not None
        assert torch.equal(one.keys, other.keys)
        assert tuple(one.leading) == tuple(other.leading)
        if keys_only:
            assert one.values is None
        else:
            assert one.values is not None
            assert other.values is not None
            assert torch.equal(one.values, other.values)
    bases = {arrival.keys.untyped_storage().data_ptr() for arrival in together if arrival.keys is not None}
    assert len(bases) == len(layers)  # one tensor for each layer
