"""How much of the real change of the weights the patterns of a run explain that was made from checkpoints.

Between two checkpoints C_k and C_{k+1} the recorded steps move the parameters by some sum of patterns; the rest is
C_{k+1} − C_k less that sum. Nothing here computes patterns: the sizes were measured when the run was made.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dualform.engine.verification import percent_text, relative


@dataclass(frozen=True, slots=True)
class IntervalRest:
    """What the patterns of some consecutive steps leave of the change between the checkpoints at their two ends.

    Attributes:
        start: the number of steps at the first checkpoint.
        stop: the number of steps at the last checkpoint.
        rest: parameter -> ‖change − what the steps' patterns made of it‖.
        change: parameter -> ‖change‖.
    """

    start: int
    stop: int
    rest: Mapping[str, float]
    change: Mapping[str, float]

    def explained(self, *parameters: str) -> float:
        """Return the explained share of the change of some parameters, or of all: 1 − ‖rest‖² / ‖change‖², 0 to 1.

        A rest that is larger than the change makes it 0: patterns that explain nothing.
        """
        return max(0.0, 1.0 - self.unexplained(*parameters) ** 2)

    def unexplained(self, *parameters: str) -> float:
        """Return ‖rest‖ / ‖change‖ of some parameters, or of all; above 1 where the patterns lead elsewhere."""
        names = parameters or tuple(self.rest)
        return relative(*(math.hypot(*(sizes[name] for name in names)) for sizes in (self.rest, self.change)))


@dataclass(frozen=True, slots=True)
class Explanation:
    """What the patterns between checkpoints explain of the change of the weights, per interval and layer.

    Attributes:
        layers: layer -> the names of its parameters.
        intervals: one entry for each pair of neighbouring checkpoints.
        whole: the rest and the change from the first checkpoint to the last.
    """

    layers: Mapping[str, tuple[str, ...]]
    intervals: tuple[IntervalRest, ...]
    whole: IntervalRest

    @property
    def explained(self) -> float:
        """The explained share of the change from the first checkpoint to the last, over all parameters, 0 to 1."""
        return self.whole.explained()

    def __str__(self) -> str:
        count = len(self.intervals) + 1
        lines = [f"explains {percent_text(self.explained)} of the change of the weights over {count} checkpoints"]
        if (size := self.whole.unexplained()) > 1:
            lines[0] += f": what no pattern explains is {size:.3g} times as large as the change"
        width = max(len(name) for name in (*self.layers, "all layers"))
        heads = [f"{one.start}-{one.stop}" for one in self.intervals] + ["whole"]
        cells = [max(len(head), 5) for head in heads]
        lines.append(f"{'steps':<{width}}  {'  '.join(f'{h:>{w}}' for h, w in zip(heads, cells, strict=True))}")
        for name, parameters in (*self.layers.items(), ("all layers", ())):
            shares = [one.explained(*parameters) for one in (*self.intervals, self.whole)]
            row = "  ".join(f"{math.floor(100 * x):>{w - 2}} %" for x, w in zip(shares, cells, strict=True))
            lines.append(f"{name:<{width}}  {row}")
        return "\n".join(lines)

    __repr__ = __str__
