"""The test examples: their targets, the model's predictions, and their texts."""

from dataclasses import dataclass

from dualform.show.session import Session
from dualform.show.text_places import text_of

MAX_TESTS = 100_000  # that the page is told of
SNIPPET_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Examples:
    """Every test's target and the model's output for it.

    Attributes:
        names: output unit -> its name.
        count: how many tests are listed.
        left_out: how many tests are not listed.
        targets: the units that would be right, where they are known.
        predictions: the units that the model predicts.
    """

    names: dict[int, str]
    count: int
    left_out: int
    targets: list[int] | None
    predictions: list[int]


@dataclass(frozen=True, slots=True)
class Snippets:
    """The ends of some tests' texts, from the test `first` on."""

    first: int
    texts: list[str]


def list_examples(session: Session) -> Examples:
    """Return every test's target and the model's output for it."""
    count = min(len(session.tests), MAX_TESTS)
    predictions = session.predictions()[:count].tolist()
    targets = None if session.targets is None else session.targets[:count].tolist()
    units = sorted({*predictions, *(targets or ())})
    names = {unit: session.name(unit) for unit in units}
    return Examples(names, count, len(session.tests) - count, targets, predictions)


def find_examples(session: Session, words: str) -> list[int]:
    """Return the tests whose text contains some words, in any case."""
    count = min(len(session.tests), MAX_TESTS)
    return [number for number in range(count) if words.casefold() in whole_text(session, number).casefold()]


def example_snippets(session: Session, first: int, count: int) -> Snippets:
    """Return the ends of the texts of `count` tests, from the test `first` on."""
    last = min(first + count, len(session.tests))
    return Snippets(first, [_shortened(whole_text(session, number)) for number in range(first, last)])


def whole_text(session: Session, number: int) -> str:
    """Return the text of a test; an empty text if the run has no vocabulary."""
    corpus = session.media.text
    if corpus is None or session.tests.is_floating_point():
        return ""
    return text_of(corpus, session.tests[number].reshape(-1).tolist())


def _shortened(text: str) -> str:
    return text if len(text) <= SNIPPET_CHARACTERS else "…" + text[-SNIPPET_CHARACTERS:]
