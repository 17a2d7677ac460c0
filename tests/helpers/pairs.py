"""Cases in which every pair of settings meets, in place of the full product of all settings."""

from collections import Counter
from collections.abc import Iterable
from itertools import combinations, product
from typing import Any


def pairwise(*factors: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return few of the factors' combinations, such that every two values of different factors meet in one.

    Each combination is chosen greedily: of those with the most pairs that have not met yet, the one whose pairs have
    met least often, and of several such ones the first. The same factors give the same combinations, in the order of
    their product.

    >>> from helpers.pairs import pairwise
    >>> pairwise("ab", [1, 2], [True, False])
    [('a', 1, True), ('a', 2, False), ('b', 1, False), ('b', 2, True)]
    """
    every = list(product(*factors))
    pairs = {combination: list(combinations(enumerate(combination), min(2, len(factors)))) for combination in every}
    left = {pair for found in pairs.values() for pair in found}
    met: Counter[Any] = Counter()

    def gain(combination: tuple[Any, ...]) -> tuple[int, int]:
        found = pairs[combination]
        return sum(pair in left for pair in found), -sum(met[pair] for pair in found)

    chosen = set()
    while left:
        best = max((one for one in every if one not in chosen), key=gain)
        left.difference_update(pairs[best])
        met.update(pairs[best])
        chosen.add(best)
    return [one for one in every if one in chosen]
