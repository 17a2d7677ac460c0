"""A long computation that somebody waits for: how far it is, and whether anybody still waits."""

from dataclasses import dataclass


class Cancelled(Exception):
    """Nobody waits for the answer any more."""


@dataclass(slots=True)
class ReportedJob:
    """The progress of one computation, reported by its thread and read by others."""

    title: str = ""
    done: int = 0
    total: int | None = None
    cancelled: bool = False

    def report(self, title: str, done: int, total: int | None) -> None:
        """Take note of progress; raise `Cancelled` when nobody waits for the answer."""
        self.title, self.done, self.total = title, done, total
        if self.cancelled:
            raise Cancelled


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a job at one moment."""

    title: str
    done: int
    total: int | None
    running: bool = True


def job_progress(job: ReportedJob) -> Progress:
    """Return the progress of a job as it is now."""
    return Progress(job.title, job.done, job.total)
