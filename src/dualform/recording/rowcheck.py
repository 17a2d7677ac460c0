"""What is known of a layer's rows: whether they are those of the batch, and where they lie in the layer's input."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["proved", "not aligned", "assumed"]
SEVERITY: Mapping[Outcome, int] = {"proved": 0, "assumed": 1, "not aligned": 2}
"""Of several outcomes for one layer the one with the highest number is kept: it holds for some of the patterns."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the rows of a batch lie among the leading axes of a layer's input.

    Attributes:
        axes: how many leading axes there are.
        axis: the one that holds the rows, alone or flattened together with something else.
        flattened: nothing where the axis holds rows alone; else whether it is (rows · n), "rows first", or (n · rows),
            "rows last".
    """

    axes: int
    axis: int
    flattened: Literal["rows first", "rows last"] | None = None

    def view(self, leading: Sequence[int], rows: int) -> tuple[tuple[int, ...], int] | None:
        """Return a shape of the leading axes in which the rows have an axis of their own, and which axis that is.

        Nothing where leading axes of this shape cannot hold so many rows in this place.

        >>> Placement(1, 0, "rows last").view((6,), 3)
        ((2, 3), 1)
        """
        if len(leading) != self.axes or not rows:
            return None
        before, size, after = tuple(leading[: self.axis]), leading[self.axis], tuple(leading[self.axis + 1 :])
        if self.flattened is None:
            return (tuple(leading), self.axis) if size == rows else None
        if size % rows:
            return None
        if self.flattened == "rows first":
            return (*before, rows, size // rows, *after), self.axis
        return (*before, size // rows, rows, *after), self.axis + 1

    def __str__(self) -> str:
        how = {None: "", "rows first": ", flattened as (rows, ...)", "rows last": ", flattened as (..., rows)"}
        return f"axis {self.axis} of {self.axes}{how[self.flattened]}"


@dataclass(frozen=True, slots=True)
class RowCheck:
    """What a trial found of one layer.

    Attributes:
        outcome: "proved", its rows are those of the batch; "not aligned", they are not; "assumed", no trial could tell.
        reason: what was found, or why nothing could be.
        placement: where the rows lie, where that is proved.
        undecided: whether all rows were equal, in some call at least, so that a later batch may tell more.
        shapes: the leading axes of the layer's inputs in the trial, where they must be these for the rows to lie there.
    """

    outcome: Outcome
    reason: str
    placement: Placement | None = None
    undecided: bool = False
    shapes: frozenset[tuple[int, ...]] = field(default=frozenset(), compare=False)

    def view(self, leading: Sequence[int], rows: int) -> tuple[tuple[int, ...], int] | None:
        """Return how the leading axes of a call hold the rows (see `Placement.view`); nothing where that is not known.

        Flattened axes of another size than in the trial hold other rows: where a model picks positions by a mask, a
        full mask shows nothing of the masks to come.
        """
        if self.placement is None:
            return None
        if self.placement.flattened is not None and self.shapes and tuple(leading) not in self.shapes:
            return None
        return self.placement.view(leading, rows)
