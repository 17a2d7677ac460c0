"""What a row of the suite is, and the registry that `@row` fills. Nothing here measures anything."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from benchmarks.bench import Bench

Unit = Literal["times", "percent", "seconds", "GB", "kB", "plain"]
SUFFIX = {"times": " ×", "percent": " %", "seconds": " s", "GB": " GB", "kB": " kB", "plain": ""}


class Skip(Exception):
    """A row that cannot be measured here; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What a row should measure: between `low` and `high`; neither for a row that is only reported."""

    low: float | None = None
    high: float | None = None

    def met(self, value: float) -> bool | None:
        """Say whether a value meets the goal, or nothing where there is none.

        >>> at_most(1.5).met(1.4), at_least(4).met(3.0), REPORTED.met(1.0)
        (True, False, None)
        """
        if self.low is None and self.high is None:
            return None
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def text(self, unit: Unit) -> str:
        """Return the goal for people.

        >>> at_most(0.15).text("percent"), between(1.9, 2.1).text("times"), REPORTED.text("times")
        ('at most 15 %', '1.9 × to 2.1 ×', 'reported')
        """
        if self.low is None:
            return "reported" if self.high is None else f"at most {show(self.high, unit)}"
        if self.high is None:
            return f"at least {show(self.low, unit)}"
        return f"{show(self.low, unit)} to {show(self.high, unit)}"


def at_most(value: float) -> Goal:
    """Ask for a value that is not larger."""
    return Goal(high=value)


def at_least(value: float) -> Goal:
    """Ask for a value that is not smaller."""
    return Goal(low=value)


def between(low: float, high: float) -> Goal:
    """Ask for a value in a range."""
    return Goal(low, high)


REPORTED = Goal()


@dataclass(frozen=True, slots=True)
class Measured:
    """What a row found.

    Attributes:
        value: the ratio (or the number) that the goal is about.
        spread: the least and the greatest such ratio of a single pair of runs, where there were several.
        detail: other numbers worth knowing, by name; times are of this machine at that moment.
    """

    value: float
    spread: tuple[float, float] | None = None
    detail: Mapping[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table.

    Attributes:
        name: what `--only` selects it by; it begins with the name of its family.
        what: what is measured.
        against: what it is compared with.
        unit: how its value is shown.
        goals: by type of device; a row is measured on the devices that it has a goal for.
        measure: measures it.
        why: by type of device, the reason for a miss, as found by profiling.
    """

    name: str
    what: str
    against: str
    unit: Unit
    goals: Mapping[str, Goal]
    measure: "Callable[[Bench], Measured]"
    why: Mapping[str, str]


ROWS: dict[str, Row] = {}
ORDER: list[str] = []  # their names as they are written down


def ordered() -> list[Row]:
    """Return all rows in the order of the table."""
    return [ROWS[name] for name in ORDER]


def row(
    name: str,
    *,
    what: str,
    against: str,
    cpu: Goal | None = None,
    cuda: Goal | None = None,
    unit: Unit = "times",
    why: str | Mapping[str, str] = "",
    **arguments: Any,
) -> Callable[[Callable[..., Measured]], Callable[..., Measured]]:
    """Register a function that measures a row; `arguments` are given to it, so that one may serve several rows."""
    goals = {device: goal for device, goal in (("cpu", cpu), ("cuda", cuda)) if goal is not None}
    reasons = {"cpu": why} if isinstance(why, str) else why
    ORDER.append(name)  # decorators are evaluated from the first to the last, but applied the other way round

    def register(measure: Callable[..., Measured]) -> Callable[..., Measured]:
        assert name not in ROWS, f"there are two rows {name!r}"
        ROWS[name] = Row(name, what, against, unit, goals, lambda bench: measure(bench, **arguments), reasons)
        return measure

    return register


def show(value: float, unit: Unit) -> str:
    """Return a value for people.

    >>> show(0.153, "percent"), show(2.004, "times"), show(0.0123, "seconds")
    ('15 %', '2 ×', '0.012 s')
    """
    if unit == "percent":
        value *= 100
    number = f"{value:,.0f}" if abs(value) >= 10 else f"{value:.{3 if abs(value) >= 1 else 2}g}"
    return number + SUFFIX[unit]
