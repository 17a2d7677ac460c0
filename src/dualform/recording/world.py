"""The processes that train together, as a recorder sees them: one by default.

A recorder asks its world wherever processes have to agree: whether it sees all patterns of the training, and whether a
step can be recorded by all of them. Recording several processes is another implementation of the protocol.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from torch import Tensor

T = TypeVar("T")


class World(Protocol):
    """Processes that train one model together. Every process calls the same methods in the same order."""

    @property
    def rank(self) -> int:
        """The number of this process among them, from 0."""

    @property
    def size(self) -> int:
        """The number of processes."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes."""

    def any(self, flag: bool) -> bool:
        """Say whether the flag is set in any process."""

    def gather(self, value: T) -> list[T]:
        """Return the value of every process, in the order of their ranks."""

    def exchange(self, outgoing: Tensor, sizes: Sequence[int], incoming: Sequence[int]) -> Sequence[Tensor]:
        """Return what every process sends to this one, in the order of ranks, on the device where it lies.

        Args:
            outgoing: what this process sends, (sum of sizes,): numbers for each process, in the order of ranks.
            sizes: how many numbers each process gets of them.
            incoming: how many numbers each process sends to this one.
        """

    def barrier(self) -> None:
        """Return when every process has come here, or is not expected to any more."""


class OneProcess:
    """A process that trains on its own."""

    rank = 0
    size = 1

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the tensor."""
        return tensor

    def any(self, flag: bool) -> bool:
        """Return the flag."""
        return flag

    def gather(self, value: T) -> list[T]:
        """Return the only value."""
        return [value]

    def exchange(self, outgoing: Tensor, sizes: Sequence[int], incoming: Sequence[int]) -> Sequence[Tensor]:
        """Return what this process sends to itself."""
        return [outgoing]

    def barrier(self) -> None:
        """Return: nobody else is to come."""
