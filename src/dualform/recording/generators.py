"""Generators of random numbers, put back as they were: a trial of a user's module must not move them."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


@contextmanager
def untouched_generators() -> Iterator[Callable[[], bool]]:
    """Restore all generators of random numbers afterwards; yields what says whether any has moved."""
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()

    def state(of_numpy: Any) -> list[Any]:
        comparable = [part.tobytes() if isinstance(part, np.ndarray) else part for part in of_numpy]
        parts: list[Any] = [random.getstate(), comparable, torch.get_rng_state()]
        return parts + (torch.cuda.get_rng_state_all() if cuda else [])

    of_numpy = np.random.get_state(legacy=True)
    before = state(of_numpy)

    def moved() -> bool:
        pairs = zip(before, state(np.random.get_state(legacy=True)), strict=True)
        return not all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)

    done = False

    def put_back() -> None:
        nonlocal done
        random.setstate(before[0])
        np.random.set_state(of_numpy)
        torch.set_rng_state(before[2])
        if cuda:
            torch.cuda.set_rng_state_all(before[3:])
        done = True

    try:
        yield moved
    finally:
        try:
            put_back()
        finally:
            if not done:
                put_back()  # once more: an interrupt has cut the first short
