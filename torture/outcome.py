"""What a campaign did and what went wrong."""

from dataclasses import dataclass, field


@dataclass
class Outcome:
    """The result of one campaign: what was done, how often, and every failure in words."""

    campaign: str
    counts: dict[str, int] = field(default_factory=dict)  # in the order of the page: "SIGKILLs of recordings" -> 412
    measures: dict[str, float] = field(default_factory=dict)  # "slowest open, s" -> 0.4
    failures: list[str] = field(default_factory=list)  # empty when all is well
    seconds: float = 0.0
