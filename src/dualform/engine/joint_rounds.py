"""Several questions in one reading: each runs in a thread of its own, and their jobs are run together.

Where a reading is a replay of a whole training, three panels of a page should cost one of them and not three. A
question's code calls its executor whenever it needs a result. Here such calls wait for each other: when every question
that is not finished waits, one of them runs the jobs of all. A question that waits for something else than jobs, such
as a lock of another question's, holds the others up for a moment only.
"""

import contextvars
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from dualform.engine.jobs import Job
from dualform.errors import DualformError

PATIENCE_SECONDS = 2.0
"""Seconds that a question's jobs wait for those of the other questions."""

RunJobs = Callable[[Sequence[Job]], list[Any]]
_current: ContextVar["JointRounds | None"] = ContextVar("joint_rounds", default=None)


@dataclass(slots=True, eq=False)
class _Call:
    """The jobs of one question, and what became of them."""

    jobs: Sequence[Job]
    results: list[Any] = field(default_factory=list)
    error: BaseException | None = None
    done: bool = False


class JointRounds:
    """Questions that are being answered together; `answer_together` makes one."""

    def __init__(self, questions: int) -> None:
        self._unfinished = questions
        self._waiting: list[_Call] = []
        self._running = False
        self._changed = threading.Condition()

    def run(self, run_jobs: RunJobs, jobs: Sequence[Job]) -> list[Any]:
        """Return the results of a question's jobs, which are run together with those of the other questions."""
        call = _Call(jobs)
        together: list[_Call] = []
        with self._changed:
            self._waiting.append(call)
            self._changed.notify_all()
            while not call.done and not together:
                self._changed.wait_for(lambda: call.done or self._is_complete(), PATIENCE_SECONDS)
                if not call.done and not self._running:
                    together, self._waiting, self._running = self._waiting, [], True
        if together:
            try:
                _run_together(run_jobs, together)
            finally:
                with self._changed:
                    self._running = False
                    for one in together:
                        one.done = True
                    self._changed.notify_all()
        if call.error is not None:
            raise call.error
        return call.results

    def finish(self) -> None:
        """Take note that one question has its answer."""
        with self._changed:
            self._unfinished -= 1
            self._changed.notify_all()

    def _is_complete(self) -> bool:
        return not self._running and len(self._waiting) >= self._unfinished


def _run_together(run_jobs: RunJobs, calls: Sequence[_Call]) -> None:
    """Run the jobs of several questions; where they are refused together, each question's alone."""
    try:
        results = iter(run_jobs([job for call in calls for job in call.jobs]))
    except DualformError as error:
        if len(calls) == 1:
            calls[0].error = error
            return
        for call in calls:
            _run_together(run_jobs, [call])
    except BaseException as error:  # every question learns of it
        for call in calls:
            call.error = error
    else:
        for call in calls:
            call.results = [next(results) for _ in call.jobs]


def joint_rounds() -> JointRounds | None:
    """Return the questions that the question of this thread is answered together with, if there are some."""
    return _current.get()


def answer_together(questions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Answer several questions with as few readings as the longest of them takes; an error stands for its answer."""
    rounds = JointRounds(len(questions))
    answers: list[Any] = [None] * len(questions)

    def answer(place: int) -> None:
        _current.set(rounds)
        try:
            answers[place] = questions[place]()
        except BaseException as error:  # the caller decides what an error means
            answers[place] = error
        finally:
            rounds.finish()

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(answer, place), name="dualform-question")
        for place in range(len(questions))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers
