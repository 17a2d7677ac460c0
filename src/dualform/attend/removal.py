"""What a mask leaves out: groups, ranges of steps, single samples, or a random part. Pure; no pattern is read here.

A removal is the union of its parts. The same removal can be read as the set to keep (`only`).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dualform.binning import Bins

Range = tuple[int, int]
"""Steps from the first up to, but without, the second."""


@dataclass(frozen=True, slots=True)
class Removal:
    """Patterns that are left out of the sum, or with `only` the only ones that stay.

    Attributes:
        by: the columns that `groups` are values of.
        groups: values of that grouping.
        steps: ranges of steps.
        samples: values of the column `sample`.
        random: leave out a random part of this size, 0 to 1, the same rows in every layer.
        seed: of the random part.
        only: keep these patterns and leave out all others.
        keep_start: whether what is left of the start stays.
    """

    by: tuple[str | Bins, ...] = ()
    groups: tuple[Any, ...] = ()
    steps: tuple[Range, ...] = ()
    samples: tuple[Any, ...] = ()
    random: float = 0.0
    seed: int = 0
    only: bool = False
    keep_start: bool = True

    @property
    def empty(self) -> bool:
        """Whether nothing is selected."""
        return not (self.groups or self.steps or self.samples or self.random)

    @property
    def nothing(self) -> bool:
        """Whether the weights stay as they are."""
        return self.empty and not self.only and self.keep_start

    def sql(self) -> str:
        """Return the condition that holds for the selected patterns, as `Memory.where` takes it."""
        return any_of(
            [
                in_groups(self.by, self.groups),
                in_steps(self.steps),
                in_groups(("sample",), self.samples),
                self.chance(),
            ]
        )

    def chance(self) -> str:
        """Return the condition of the random part."""
        if not self.random:
            return ""
        return f"hash(step, micro, row, {self.seed}) % 1000000 < {round(self.random * 1_000_000)}"


def any_of(conditions: Iterable[str]) -> str:
    """Join conditions by OR; an empty one is none, and no condition at all holds nowhere."""
    return " OR ".join(f"({one})" for one in conditions if one) or "FALSE"


def in_steps(ranges: Sequence[Range]) -> str:
    """Return the condition that a step is in one of the ranges."""
    return " OR ".join(f"(step >= {int(a)} AND step < {int(b)})" for a, b in ranges)


def in_groups(by: Sequence[str | Bins], groups: Sequence[Any]) -> str:
    """Return the condition that the columns have the values of one of the groups.

    >>> print(in_groups(("task", "label"), [("mnist", 3)]))
    ("task" = 'mnist' AND "label" = 3)
    """
    rows = [group if len(by) > 1 else (group,) for group in groups]
    joined = [" AND ".join(_equality_sql(part, value) for part, value in zip(by, row, strict=True)) for row in rows]
    return " OR ".join(f"({one})" for one in joined)


def _equality_sql(part: str | Bins, value: Any) -> str:
    column = part if isinstance(part, str) else part.column
    name = '"' + column.replace('"', '""') + '"'
    if isinstance(part, Bins) and value is not None and value == value:
        return f"({name} >= {value!r} AND {name} < {value + part.width!r})"
    if value is None:
        return f"{name} IS NULL"
    if isinstance(value, float) and math.isnan(value):
        return f"isnan({name})"
    if isinstance(value, str):
        return f"{name} = '" + value.replace("'", "''") + "'"
    return f"{name} = {value!r}"


def split_into_bins(ranges: Sequence[Range], width: int, last: int) -> tuple[list[int], list[Range]]:
    """Split ranges of steps into whole bins and what is left over.

    >>> split_into_bins([(5, 31)], 10, 100)
    ([10, 20], [(5, 10), (30, 31)])

    Args:
        ranges: the ranges.
        width: of the bins.
        last: the number of steps there are; the last bin may be shorter.
    """
    whole: set[int] = set()
    rest: list[Range] = []
    for first, stop in ranges:
        stop = min(stop, last)
        low = -(-first // width) * width
        high = last if stop == last else stop // width * width
        if low >= high:
            rest.append((first, stop))
            continue
        whole |= set(range(low, high, width))
        rest += [part for part in ((first, low), (high, stop)) if part[0] < part[1]]
    return sorted(whole), rest
