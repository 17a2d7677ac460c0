"""Two things in turn: the only way in which this suite takes a time."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Pairs:
    """Seconds of two things that were run in turn.

    The ratio is that of the shortest run of each: what else happens on the machine only ever adds time.

    >>> pairs = Pairs((3.0, 2.0, 9.0), (1.0, 4.0, 1.5))
    >>> pairs.ratio, pairs.median, pairs.spread
    (2.0, 3.0, (0.5, 6.0))
    """

    ours: tuple[float, ...]
    theirs: tuple[float, ...]
    processor: float = math.nan  # the ratio of the least processor times, of all threads together

    @property
    def ratio(self) -> float:
        """Our shortest run over theirs."""
        return min(self.ours) / min(self.theirs)

    @property
    def ratios(self) -> list[float]:
        """Ours over theirs, pair by pair."""
        return [a / b for a, b in zip(self.ours, self.theirs, strict=True)]

    @property
    def median(self) -> float:
        """The median of the pairs' ratios."""
        return statistics.median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """The least and the greatest ratio of a pair."""
        return min(self.ratios), max(self.ratios)

    def detail(self, ours: str = "ours", theirs: str = "against") -> dict[str, float | int | str]:
        """Return what a row keeps beside the ratio."""
        return {
            f"{ours}, s": min(self.ours),
            f"{theirs}, s": min(self.theirs),
            "pairs": len(self.ours),
            "median of the pairs' ratios": self.median,
            "ratio of processor times": self.processor,
        }


def seconds(work: Callable[[], object], device: torch.device | str = "cpu") -> float:
    """Return how long some work takes, what it queued on the device included."""
    wait(device)
    start = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - start


def wait(device: torch.device | str) -> None:
    """Wait until the device has done what it was given."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def alternate(
    ours: Callable[[], object],
    theirs: Callable[[], object],
    *,
    device: torch.device | str = "cpu",
    budget: float = 20.0,
    least: int = 3,
    most: int = 25,
    warm: int = 1,
) -> Pairs:
    """Run two things in turn, each first in every other pair, until `budget` seconds are spent."""
    return timed_pairs(lambda: seconds(ours, device), lambda: seconds(theirs, device), budget, least, most, warm)


def of_steps(inside: Sequence[float]) -> dict[str, float | int | str]:
    """Return what the training thread spent inside of the recorder, as a row's details have it, from each step's.

    The median is that of a usual step; full checks and trials of rows, which few steps have, are in the mean.
    """
    usual, mean = 1e3 * statistics.median(inside), 1e3 * statistics.mean(inside)
    return {"inside the recorder, ms in a usual step": usual, "inside the recorder, ms per step": mean}


def timed_pairs(
    ours: Callable[[], float],
    theirs: Callable[[], float],
    budget: float = 20.0,
    least: int = 3,
    most: int = 25,
    warm: int = 1,
) -> Pairs:
    """As `alternate`, for work that times the part of itself that counts."""
    for _ in range(warm):
        ours(), theirs()
    found: list[tuple[float, float]] = []
    taken: tuple[list[float], list[float]] = ([], [])

    def watched(work: Callable[[], float], which: int) -> float:
        before = time.process_time()
        result = work()
        taken[which].append(time.process_time() - before)
        return result

    gc.collect()
    start = time.perf_counter()
    while len(found) < least or (len(found) < most and time.perf_counter() - start < budget):
        if len(found) % 2:
            second = watched(theirs, 1)
            found.append((watched(ours, 0), second))
        else:
            first = watched(ours, 0)
            found.append((first, watched(theirs, 1)))
    processor = min(taken[0]) / min(taken[1]) if min(taken[1]) else math.nan
    return Pairs(tuple(a for a, _ in found), tuple(b for _, b in found), processor)
