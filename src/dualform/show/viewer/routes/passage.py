"""A passage of the training text around a place."""

from typing import Any

from dualform.show.viewer.ask import Ask, BadQuestion
from dualform.show.viewer.questions import question
from dualform.show.viewer.session import Session

CONTEXT = 20  # tokens on each side
WIDEST = 400


@question("/api/passage")
def passage(session: Session, ask: Ask) -> dict[str, Any]:
    """Return the tokens around a place, as wide as asked."""
    if session.media.text is None:
        raise BadQuestion("This run keeps no text.")
    place = ask.number("place", high=max(len(session.media.text.tokens) - 1, 0))
    return passage_of(session, place, context=ask.number("context", CONTEXT, low=1, high=WIDEST))


def passage_of(session: Session, place: int, *, context: int = CONTEXT) -> dict[str, Any]:
    """Return what stands before a place, the token there, and what follows."""
    text = session.media.text
    assert text is not None, "asked only where there is a text"
    wide = context if text.joiner else 4 * context  # characters say less than words
    return {
        "place": place,
        "before": text.joiner.join(text.words(place - wide, place)) + text.joiner,
        "token": text.joiner.join(text.words(place, place + 1)),
        "after": text.joiner + text.joiner.join(text.words(place + 1, place + wide + 1)),
        "title": text.title(place),
    }
