"""How an answer is drawn, in a notebook and as a picture: by functions that are registered for its class.

Answers do not know what draws them: the room that draws registers functions, which are looked up here.
"""

from collections.abc import Callable
from typing import Any

_DRAWN: dict[str, Callable[[Any], str]] = {}
_PICTURES: dict[str, Callable[[Any, int], Any]] = {}


def register_html(class_name: str, draw: Callable[[Any], str]) -> None:
    """Register the function that returns the HTML of the answers of a class."""
    _DRAWN[class_name] = draw


def notebook_html(answer: object) -> str | None:
    """Return an answer as HTML, or None if no function is registered for its class; notebooks print its repr then."""
    draw = _DRAWN.get(type(answer).__name__)
    return None if draw is None else draw(answer)


def register_picture(class_name: str, draw: Callable[[Any, int], Any]) -> None:
    """Register the function that returns a figure of one query of the answers of a class."""
    _PICTURES[class_name] = draw


def picture_of(answer: object, query: int) -> Any:
    """Return a figure of one query of an answer."""
    return _PICTURES[type(answer).__name__](answer, query)
