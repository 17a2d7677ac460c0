"""How an answer is drawn in a notebook: by a function that is registered for its class.

Answers do not know what draws them: the room that draws registers a function, and `_repr_html_` looks it up here.
"""

from collections.abc import Callable
from typing import Any

_DRAWN: dict[str, Callable[[Any], str]] = {}


def register_html(class_name: str, draw: Callable[[Any], str]) -> None:
    """Register the function that returns the HTML of the answers of a class."""
    _DRAWN[class_name] = draw


def notebook_html(answer: object) -> str | None:
    """Return an answer as HTML, or None if no function is registered for its class; notebooks print its repr then."""
    draw = _DRAWN.get(type(answer).__name__)
    return None if draw is None else draw(answer)
