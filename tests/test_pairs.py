"""Cases made by `pairwise`: all pairs meet, in no more cases than it takes, and evenly."""

from collections import Counter
from itertools import combinations, product
from typing import Any

import pytest

from helpers.pairs import pairwise

SIZES = [(3,), (2, 5), (33, 10, 2), (7, 6, 2), (4, 4, 4), (9, 2, 2), (12, 3, 2, 2), (2, 2, 2, 2, 2), (1, 4, 1)]


def met(cases: list[tuple[Any, ...]]) -> set[Any]:
    """Return which values of which factors meet in some case."""
    return {(i, case[i], j, case[j]) for case in cases for i, j in combinations(range(len(case)), 2)}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_pair_meets_in_few_cases(sizes: tuple[int, ...]) -> None:
    factors = [[f"{place}{value}" for value in range(size)] for place, size in enumerate(sizes)]
    cases, whole = pairwise(*factors), list(product(*factors))
    assert met(cases) == met(whole)
    assert cases == [case for case in whole if case in cases] == pairwise(*factors)
    largest = sorted(sizes)[-2:]
    fewest = largest[0] * largest[1] if len(sizes) > 1 else sizes[0]  # of the two largest factors all values meet
    assert fewest <= len(cases) <= 1.5 * fewest
    for case in cases if len(sizes) == 2 else ():
        assert met([other for other in cases if other != case]) < met(whole)  # none of them is too many


def test_values_that_need_not_meet_again_take_turns() -> None:
    """Of ten optimizers each layer has five in either dtype."""
    counts = Counter((layer, dtype) for layer, _, dtype in pairwise(range(33), range(10), range(2)))
    assert set(counts.values()) == {5}
