"""The best patterns of several passes, found together, are those that each pass finds by itself."""

import numpy as np
import pytest
import torch

from dualform.engine.block import Block
from dualform.engine.reducers import Best, one_group
from dualform.replaying import joined_best
from dualform.replaying.joined_best import JoinedBest

PASSES, QUERIES = 3, 4


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("waiting_bytes", [1, 600, 1 << 30])
def test_passes_that_compete_together_find_what_each_finds(
    largest: bool, waiting_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joined_best, "WAITING_BYTES", waiting_bytes)
    reducer = Best(1, 5, largest)
    generator = torch.Generator().manual_seed(0)
    together = JoinedBest(reducer, PASSES, QUERIES, torch.empty(0))
    states = [reducer.new(torch.empty(QUERIES, 0)) for _ in range(PASSES)]
    for window in range(6):
        for place in range(PASSES):
            size = 3 if place < 2 else 1 + window  # passes of other layers may see other numbers of patterns
            if window == place:
                continue  # and none in some steps
            first = 100 * window
            block = Block(np.arange(first, first + size), torch.zeros(size, 2))
            measures = torch.randn(QUERIES, size, generator=generator)
            together.add(place, block, measures)
            states[place] = reducer.add(states[place], block, measures, one_group(size, measures.device))
        together.settle_if_many()
    for place, state in enumerate(states):
        found = together.result(place)
        assert torch.equal(found.measures, state.measures)
        assert torch.equal(found.patterns, state.patterns)


def test_fewer_patterns_than_asked_for_leave_empty_places() -> None:
    together = JoinedBest(Best(1, 5), 1, 1, torch.empty(0))
    together.add(0, Block(np.arange(2), torch.zeros(2, 2)), torch.tensor([[1.0, 2.0]]))
    found = together.result(0)
    assert found.patterns.tolist() == [[[1, 0, -1, -1, -1]]]
    assert found.measures[0, 0, :2].tolist() == [2.0, 1.0]
