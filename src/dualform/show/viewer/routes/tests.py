"""The test examples: what they are, what the model says, and the text of some of them."""

from typing import Any

from dualform.show.passages import text_of
from dualform.show.viewer.ask import Ask, BadQuestion
from dualform.show.viewer.questions import question
from dualform.show.viewer.session import Session

MOST = 100_000  # tests that the page is told of
SNIPPET = 60  # characters
AT_ONCE = 200


@question("/api/tests")
def tests(session: Session, ask: Ask) -> dict[str, Any]:
    """Return every test's target and the model's output for it."""
    count = min(len(session.tests), MOST)
    targets = session.targets
    predictions = session.predictions()[:count].tolist()
    wanted = None if targets is None else targets[:count].tolist()
    return {
        "names": {unit: session.name(unit) for unit in sorted({*predictions, *(wanted or ())})},
        "count": count,
        "left_out": len(session.tests) - count,
        "targets": wanted,
        "predictions": predictions,
    }


@question("/api/snippets")
def snippets(session: Session, ask: Ask) -> dict[str, Any]:
    """Return the end of some tests' texts."""
    first = ask.number("first", 0)
    last = min(first + ask.number("count", 50, low=1, high=AT_ONCE), len(session.tests))
    return {"first": first, "texts": [snippet(session, number) for number in range(first, last)]}


@question("/api/search")
def search(session: Session, ask: Ask) -> dict[str, Any]:
    """Return the tests whose text contains some words."""
    words = ask.text("text", longest=200).strip()
    if not words:
        raise BadQuestion("There is nothing to search for.")
    count = min(len(session.tests), MOST)
    return {"tests": [n for n in range(count) if words.casefold() in whole_text(session, n).casefold()]}


def whole_text(session: Session, number: int) -> str:
    """Return the text of a test, where the run has a vocabulary."""
    corpus = session.media.text
    if corpus is None or session.tests.is_floating_point():
        return ""
    return text_of(corpus, session.tests[number].reshape(-1).tolist())


def snippet(session: Session, number: int) -> str:
    """Return the end of a test's text."""
    text = whole_text(session, number)
    return text if len(text) <= SNIPPET else "…" + text[-SNIPPET:]
