"""The registry of questions: a path, and a plain function from an opened run and parameters to what JSON can hold."""

from collections.abc import Callable
from typing import Any

from dualform.show.viewer.ask import Ask
from dualform.show.viewer.session import Session

Answer = Callable[[Session, Ask], Any]
_QUESTIONS: dict[str, Answer] = {}


def question(path: str) -> Callable[[Answer], Answer]:
    """Register the function that answers a path. It runs in a thread and may take long."""

    def register(answer: Answer) -> Answer:
        _QUESTIONS[path] = answer
        return answer

    return register


def questions() -> dict[str, Answer]:
    """Return every registered question by its path."""
    from dualform.show.viewer import routes  # noqa: F401 (registers them)

    return dict(_QUESTIONS)
