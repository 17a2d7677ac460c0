"""What a recording keeps of a training: patterns, shares of the weights by group, or facts of the steps alone."""

from collections.abc import Sequence
from dataclasses import dataclass
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
