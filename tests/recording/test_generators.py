"""Trials of a user's modules leave every generator of random numbers as it was."""

import random

import numpy as np
import torch
from torch import Tensor, nn

from dualform.recording.generators import untouched_generators
from dualform.recording.layers import find_kind


class DrawingScale(nn.Module):
    """A layer scale that draws random numbers of all kinds in training."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(5))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return inputs · gamma."""
        if self.training:
            random.random(), np.random.rand(), torch.rand(1)
        return inputs * self.gamma


def states() -> list[object]:
    return [
        random.getstate(),
        [np.asarray(part).tolist() for part in np.random.get_state()],
        torch.get_rng_state().tolist(),
    ]


def test_recognising_a_module_moves_no_generator() -> None:
    before = states()
    assert find_kind(DrawingScale()) is not None
    assert states() == before


def test_a_generator_that_moved_is_told_and_put_back() -> None:
    before = states()
    for draw in (random.random, np.random.rand, lambda: torch.rand(1)):
        with untouched_generators() as moved:
            assert not moved()
            draw()
            assert moved()
        assert states() == before
