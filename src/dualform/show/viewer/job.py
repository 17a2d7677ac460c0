"""One question on its way: how far it is, and whether anybody still waits for it."""

from dataclasses import dataclass
from typing import Any


class Cancelled(Exception):
    """Whoever asked has gone."""


@dataclass(slots=True)
class Job:
    """One question on its way."""

    title: str = ""
    done: int = 0
    total: int | None = None
    cancelled: bool = False

    def report(self, title: str, done: int, total: int | None) -> None:
        """Take note of progress; raise when nobody waits for the answer."""
        self.title, self.done, self.total = title, done, total
        if self.cancelled:
            raise Cancelled


def describe(job: Job | None) -> dict[str, Any]:
    """Return a job's progress as JSON."""
    if job is None:
        return {"running": False}
    return {"running": True, "title": job.title, "done": job.done, "total": job.total}
