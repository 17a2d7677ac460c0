"""`ShareSource`: exact sums of a training by group, where single patterns are not kept or not needed.

The memory of patterns makes shares by taking the steps again; a recording with `keep=Shares(...)` makes them while it
trains. Whoever has a `ShareSource` can ask for weights, masks by group, and totals by group.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ParameterShares:
    """What each group of patterns made of one parameter: parameter = start + shares + unexplained + rounding.

    Attributes:
        labels: (G,) each group's value, or tuple of values where the grouping has several columns; None for no value.
        shares: (G, ...) each group's share, of the patterns of one layer or of all that use the parameter.
        start: what is left of the parameter as it was at the start.
        unexplained: what those parts of the gradients made that no pattern explains.
        rounding: what the steps did beyond their linear maps.
    """

    labels: tuple[Any, ...]
    shares: Tensor
    start: Tensor
    unexplained: Tensor
    rounding: Tensor


@dataclass(frozen=True, slots=True)
class GroupKeySums:
    """The sum of a layer's keys in each group, for signed totals of attention.

    Attributes:
        labels: (G,) as in `ParameterShares`.
        sums: (G, d_in) float64.
        counts: (G,) how many patterns are in each group, int64.
        lowest: the least element of all keys, or any negative element of them. Where it is not negative, and no query
            is either, magnitude is attention.
    """

    labels: tuple[Any, ...]
    sums: Tensor
    counts: Tensor
    lowest: float


class ShareSource(ABC):
    """Exact sums of a training by group."""

    @property
    @abstractmethod
    def groupings(self) -> tuple[tuple[str, ...], ...]:
        """The groupings that are kept, each as the names of its columns; bins as `Bins` writes itself, "step:100"."""

    @property
    @abstractmethod
    def horizons(self) -> tuple[int, ...]:
        """After how many steps the sums are kept, ascending; the last is the end of the run."""

    @abstractmethod
    def labels(self, by: tuple[str, ...]) -> tuple[Any, ...]:
        """Return the groups of a grouping."""

    def rest_place(self, by: tuple[str, ...]) -> int | None:
        """Return the place of the group of all patterns whose own groups are not kept; None where all are."""
        return None

    @abstractmethod
    def shares(
        self, parameter: str, by: tuple[str, ...], *, layer: str | None = None, horizon: int | None = None
    ) -> ParameterShares:
        """Return a parameter's shares; those of one layer's patterns alone where several layers use it."""

    @abstractmethod
    def key_sums(self, layer: str, by: tuple[str, ...], *, horizon: int | None = None) -> GroupKeySums:
        """Return a layer's key sums by group."""

    def expected_noise(self, parameter: str, *, horizon: int | None = None) -> float:
        """Return the size that the optimizer's own coarse rounding is expected to have in a parameter; 0 if unknown."""
        return 0.0

    def gradient_spread(self, parameter: str, *, horizon: int | None = None) -> Tensor | None:
        """Return how far rounding of the gradients may have carried each element of a parameter; None if unknown.

        One standard deviation, in the parameter's shape, float64.
        """
        return None

    def stored_bytes(self, layer: str) -> int:
        """Return how many bytes the sums of a layer take where they are stored; 0 where they are not."""
        return 0
