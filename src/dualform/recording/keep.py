"""What a recording keeps of a training: patterns, shares of the weights by group, or facts of the steps alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from dualform.recording.watch import Dtype, Layers


@dataclass(frozen=True, slots=True)
class Patterns:
    """Keep every key and value: all questions can be asked of them.

    Attributes:
        layers: which layers' patterns; by default those that the recording watches.
        dtype: what they are stored in, as `dualform.record` takes it.
    """

    layers: Layers = None
    dtype: Dtype = None


@dataclass(frozen=True, slots=True)
class Shares:
    """Keep, for each group of patterns, the sum of what they made of every weight: constant size, no single pattern.

    Attributes:
        by: what groups the patterns: a column, several of them, or `dualform.bins(...)`, as `totals(by=...)` takes it;
            or a list of such groupings, each given as a list or tuple, to keep several.
        at: after which steps the shares are kept, besides the last.
        groups: how many groups there may be in each grouping.
        rest: put patterns of groups beyond these into one group, instead of refusing them.
        device: where the shares are kept while training; by default where the parameters are.
    """

    by: Any
    at: Sequence[int] = ()
    groups: int = 64
    rest: bool = False
    device: str | None = None


@dataclass(frozen=True, slots=True)
class Steps:
    """Keep facts and fingerprints of the steps alone: patterns come back when the training is replayed."""


Keep = Patterns | Shares | Steps


def as_keeps(keep: Keep | Sequence[Keep] | None) -> tuple[Keep, ...]:
    """Return what a recording keeps as a tuple: of one thing, of several, or by default of all patterns."""
    if keep is None:
        return (Patterns(),)
    several = tuple(keep) if isinstance(keep, Sequence) else (keep,)
    for one in several:
        if not isinstance(one, Patterns | Shares | Steps):
            raise ValueError(f"keep is {one!r}; expected Patterns(...), Shares(...) or Steps(), or several of these.")
    if not several:
        raise ValueError("keep is empty; expected Patterns(...), Shares(...) or Steps(), or several of these.")
    return several


def keeps_patterns(keep: Sequence[Keep], layer: str) -> bool:
    """Say whether a recording that keeps these things stores the patterns of a layer."""
    for one in keep:
        if isinstance(one, Patterns):
            wanted = ["*"] if one.layers is None else [one.layers] if isinstance(one.layers, str) else list(one.layers)
            if any(pattern == layer or fnmatchcase(layer, pattern) for pattern in wanted):
                return True
    return False
