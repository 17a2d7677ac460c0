"""A passage of the training text around a place."""

from typing import Any

from dualform.show.passages import CONTEXT, around
from dualform.show.viewer.ask import Ask, BadQuestion
from dualform.show.viewer.questions import question
from dualform.show.viewer.session import Session

WIDEST = 400


@question("/api/passage")
def passage(session: Session, ask: Ask) -> dict[str, Any]:
    """Return the tokens around a place, as wide as asked."""
    corpus = session.media.text
    if corpus is None:
        raise BadQuestion("This run keeps no text.")
    place = ask.number("place", high=max(len(corpus.train) - 1, 0))
    return around(corpus, place, context=ask.number("context", CONTEXT, low=1, high=WIDEST))
