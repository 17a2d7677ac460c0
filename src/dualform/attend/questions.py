"""Questions to a spotlight as data, so that several can be answered by one reading of the patterns.

    totals, best = spotlight.compute(dualform.Totals(by="label"), dualform.Top(5))

is what `totals(by="label")` and `top(5)` give layer by layer, but no pattern is read twice.
"""

from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch import Tensor

from dualform.binning import By
from dualform.engine.jobs import Executor, Job
from dualform.engine.measures import Of
from dualform.engine.source import PatternSource

Per = Literal["pattern", "sample"]
A = TypeVar("A")
Plan = Generator[list[Job], list[Any], A]
"""How a question is answered: yields the jobs it needs next, is sent their results, and returns the answer."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the patterns of each group: see `LayerSpotlight.totals`."""

    by: By
    of: Of = "attention"


@dataclass(frozen=True, slots=True, eq=False)
class Top:
    """The best patterns or samples: see `LayerSpotlight.top`."""

    k: int
    by: By | None = None
    of: Of = "attention"
    per: Per = "pattern"
    largest: bool = True
    unit: int | Tensor | None = None
    columns: Collection[str] | None = None


Question = Totals | Top


def answer_all(source: PatternSource, executor: Executor, plans: Sequence[Plan[Any]]) -> list[Any]:
    """Carry out plans side by side: the jobs that they need at the same time are run together."""
    whole = answer_side_by_side(plans)
    results: list[Any] | None = None
    while True:
        try:
            jobs = next(whole) if results is None else whole.send(results)
        except StopIteration as end:
            answers: list[Any] = end.value
            return answers
        results = executor.run(source, jobs)


def answer_side_by_side(plans: Sequence[Plan[Any]]) -> Plan[list[Any]]:
    """Return the plan of several plans: the jobs that they need at the same time come together."""
    answers: dict[int, Any] = {}
    waiting = {
        number: jobs for number in range(len(plans)) if (jobs := _advance(plans, number, None, answers)) is not None
    }
    while waiting:
        found = iter((yield [job for jobs in waiting.values() for job in jobs]))
        results = {number: [next(found) for _ in jobs] for number, jobs in waiting.items()}
        waiting = {
            number: jobs
            for number, mine in results.items()
            if (jobs := _advance(plans, number, mine, answers)) is not None
        }
    return [answers[number] for number in range(len(plans))]


def _advance(
    plans: Sequence[Plan[Any]], number: int, results: list[Any] | None, answers: dict[int, Any]
) -> list[Job] | None:
    """Go on with one of several plans; return the jobs that it needs next, or None with its answer in `answers`."""
    try:
        return next(plans[number]) if results is None else plans[number].send(results)
    except StopIteration as end:
        answers[number] = end.value
        return None
