"""Questions that are answered together share their rounds of jobs, and none waits for ever."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from dualform.engine import joint_rounds
from dualform.engine.jobs import Job
from dualform.engine.joint_rounds import answer_together
from dualform.errors import QueryError


class Rounds:
    """Runs jobs, which are numbers here, and keeps each round of them."""

    def __init__(self) -> None:
        self.rounds: list[list[Any]] = []

    def __call__(self, jobs: Sequence[Any]) -> list[Any]:
        self.rounds.append(sorted(jobs))
        if any(job == 13 for job in jobs):
            raise QueryError("thirteen")
        return [f"answer {job}" for job in jobs]

    def question(self, *jobs: Any) -> Any:
        def ask() -> list[Any]:
            rounds = joint_rounds.joint_rounds()
            assert rounds is not None
            return [rounds.run(self, [job])[0] for job in jobs]

        return ask


def test_the_longest_question_says_how_many_rounds_there_are() -> None:
    run = Rounds()
    found = answer_together([run.question(1, 2, 3), run.question(10), run.question(20, 21)])
    assert found == [["answer 1", "answer 2", "answer 3"], ["answer 10"], ["answer 20", "answer 21"]]
    assert run.rounds == [[1, 10, 20], [2, 21], [3]]
    assert joint_rounds.joint_rounds() is None


def test_a_refused_job_is_its_own_questions_error() -> None:
    run = Rounds()
    first, second = answer_together([run.question(1), run.question(13)])
    assert first == ["answer 1"]
    assert isinstance(second, QueryError)


def test_any_other_failure_ends_every_question() -> None:
    def fail(jobs: Sequence[Job]) -> list[Any]:
        raise KeyboardInterrupt

    def ask() -> list[Any]:
        rounds = joint_rounds.joint_rounds()
        assert rounds is not None
        return rounds.run(fail, [])

    assert all(isinstance(one, KeyboardInterrupt) for one in answer_together([ask, ask]))


def test_a_question_that_waits_for_another_does_not_hold_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_rounds, "PATIENCE_SECONDS", 0.05)
    run, finished = Rounds(), threading.Event()

    def first() -> Any:
        found = run.question(1)()
        finished.set()
        return found

    def second() -> Any:
        assert finished.wait(10), "the first does not wait for this one"
        return run.question(2)()

    assert answer_together([first, second]) == [["answer 1"], ["answer 2"]]
    assert run.rounds == [[1], [2]]
