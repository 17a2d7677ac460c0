"""How much of what was trained a run covers: the recorded layers' parameters against all that the optimizers held."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dualform.engine.source import PatternSource
from dualform.lazy import compute as pc

MAX_NAMED_PARAMETERS = 6  # uncovered parameters that a text names; the rest is a number


@dataclass(frozen=True, slots=True)
class Coverage:
    """The trained elements that recorded layers cover, and those that none covers.

    Attributes:
        uncovered: each trained parameter that no recorded layer covers, with its number of elements.
        recorded: the number of trained elements that recorded layers cover.
    """

    uncovered: Mapping[str, int]
    recorded: int

    @property
    def uncovered_share(self) -> float:
        """The share of the trained elements that no recorded layer covers, 0 to 1."""
        missing = sum(self.uncovered.values())
        return missing / (missing + self.recorded) if missing else 0.0

    @property
    def passed_text(self) -> str:
        """The verdict of a verification that found nothing wrong, as far as it can go."""
        if not self.uncovered:
            return "passed"
        if not self.recorded:
            return "nothing to compare: no trained parameter is recorded"
        return f"passed for what is recorded ({share_text(1 - self.uncovered_share)} of the trained elements)"

    def __str__(self) -> str:
        if not self.uncovered:
            return ""
        names = list(self.uncovered)
        more = f" and {len(names) - MAX_NAMED_PARAMETERS} more" if len(names) > MAX_NAMED_PARAMETERS else ""
        parameters = "1 parameter" if len(names) == 1 else f"{len(names)} parameters"
        return (
            f"not recorded: {parameters}, {share_text(self.uncovered_share)} of the trained elements: "
            f"{', '.join(names[:MAX_NAMED_PARAMETERS])}{more}"
        )


def share_text(share: float) -> str:
    """Return a share as a percentage that is 0 or 100 only where the share is exactly nothing or all.

    >>> share_text(0.996), share_text(0.00001), share_text(0.99999), share_text(1.0)
    ('99.6 %', 'less than 0.1 %', 'more than 99.9 %', '100.0 %')
    """
    if 0 < share < 0.001:
        return "less than 0.1 %"
    return "more than 99.9 %" if 0.999 < share < 1 else f"{100 * share:.1f} %"


def coverage(run: PatternSource) -> Coverage:
    """Return how much of a run's trained elements is recorded; a parameter that no optimizer held is not trained."""
    parameters = run.description.parameters
    table = run.steps_table
    known = set(pc.unique(table["parameter"]).to_pylist()) if table.num_rows else set()
    trained = known if run.steps else set(parameters)
    recorded = sum(torch.Size(entry.shape).numel() for name, entry in parameters.items() if name in trained)
    return Coverage(dict(run.description.uncovered), recorded)
