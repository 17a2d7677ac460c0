"""Replays that somebody asked for: several panels' questions in one run of the training, in a thread of its own.

A page may be closed meanwhile, or ask about something else: the replay goes on, and its answers are kept. There is one
at a time.
"""

import contextvars
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dualform.engine.consent import asking_before_replays
from dualform.engine.joint_rounds import answer_together
from dualform.errors import DualformError
from dualform.progress import watching
from dualform.show.job import Cancelled, ReportedJob
from dualform.show.session import Session

MAX_KEPT = 512  # answers of replays that stay with a session


@dataclass(frozen=True, slots=True)
class ReplayState:
    """The replay that runs now or ran last.

    Attributes:
        state: "none", "running", "done", "failed" or "cancelled".
        title: what is being done.
        done: how many steps are done.
        total: of how many.
        seconds: since the beginning; of a replay that has ended, how long it took.
        left: about how many seconds are left, once some steps are done.
        error: why it failed.
    """

    state: str
    title: str = ""
    done: int = 0
    total: int | None = None
    seconds: float = 0.0
    left: float | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class ReplayQuestion:
    """A panel's question: the name of its answer, and what answers it."""

    name: str
    answer: Callable[[Session], Any]


class Replays:
    """Starts replays, one at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: _RunningReplay | None = None

    def start(self, session: Session, questions: Sequence[ReplayQuestion]) -> ReplayState:
        """Begin a replay that answers some questions, unless one is running already."""
        with self._lock:
            if self._current is None or not self._current.thread.is_alive():
                self._current = _RunningReplay(session, questions)
            return self._current.state()

    def state(self) -> ReplayState:
        """Return how far the replay is."""
        current = self._current
        return ReplayState("none") if current is None else current.state()

    def cancel(self) -> ReplayState:
        """Stop the replay at its next step."""
        current = self._current
        if current is not None:
            current.job.cancelled = True
        return self.state()

    def close(self) -> None:
        """Stop the replay, and wait for its end."""
        self.cancel()
        if self._current is not None:
            self._current.thread.join(10)


class _RunningReplay:
    """A thread that answers questions with replays allowed, and keeps the answers with the session."""

    def __init__(self, session: Session, questions: Sequence[ReplayQuestion]) -> None:
        self.job = ReportedJob("replaying")
        self._session = session
        self._questions = questions
        self._began = time.monotonic()
        self._ended: float | None = None
        self._outcome = "running"
        self._error = ""
        context = contextvars.Context()  # nothing of the request that began it
        self.thread = threading.Thread(target=context.run, args=(self._work,), name="dualform-replay", daemon=True)
        self.thread.start()

    def state(self) -> ReplayState:
        """Return how far the replay is."""
        job = self.job
        seconds = (self._ended or time.monotonic()) - self._began
        left = seconds / job.done * (job.total - job.done) if job.done and job.total else None
        return ReplayState(
            self._outcome, job.title, job.done, job.total, seconds, left if self._ended is None else None, self._error
        )

    def _work(self) -> None:
        try:
            with watching(self.job.report), asking_before_replays(False):
                found = answer_together([partial(one.answer, self._session) for one in self._questions])
            self._keep(dict(zip((one.name for one in self._questions), found, strict=True)))
        except BaseException as error:  # the thread's end: the page shows it
            self._outcome, self._error = "failed", f"{type(error).__name__}: {error}"
        finally:
            self._ended = time.monotonic()

    def _keep(self, found: Mapping[str, Any]) -> None:
        """Keep answers, and refusals of a question; any other error ends the replay."""
        for name, answer in found.items():
            if not isinstance(answer, BaseException) or isinstance(answer, DualformError):
                self._session.replayed[name] = answer
        while len(self._session.replayed) > MAX_KEPT:
            self._session.replayed.pop(next(iter(self._session.replayed)))
        errors = [one for one in found.values() if isinstance(one, BaseException)]
        if any(isinstance(error, Cancelled) for error in errors):
            self._outcome = "cancelled"
        elif errors and len(errors) == len(found):
            self._outcome, self._error = "failed", str(errors[0])
        else:
            self._outcome = "done"
