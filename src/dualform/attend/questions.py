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
    running: dict[int, tuple[Plan[Any], list[Job]]] = {}

    def advance(number: int, plan: Plan[Any], results: list[Any] | None) -> None:
        try:
            jobs = next(plan) if results is None else plan.send(results)
        except StopIteration as end:
            running.pop(number, None)
            answers[number] = end.value
        else:
            running[number] = (plan, jobs)

    for number, plan in enumerate(plans):
        advance(number, plan, None)
    while running:
        waiting = list(running.items())
        found = iter((yield [job for _, (_, jobs) in waiting for job in jobs]))
        for number, (plan, jobs) in waiting:
            advance(number, plan, [next(found) for _ in jobs])
    return [answers[number] for number in range(len(plans))]
