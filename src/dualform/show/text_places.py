"""Places of a training text as people read them: the passage around a place, and the names of tokens and documents."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from dualform.corpus import Corpus
from dualform.tokens import join, space_between, visible

CONTEXT_TOKENS = 20  # words or pieces on each side; four times as many characters


@dataclass(frozen=True, slots=True)
class TextPlace:
    """One token of a training text, and the passage around it.

    Attributes:
        place: the number of the token in the text.
        before: the text before the token.
        token: the token itself.
        after: the text after the token.
        title: the title of the document; None where the document has none.
    """

    place: int
    before: str
    token: str
    after: str
    title: str | None


def text_around(corpus: Corpus, place: int, *, context: int = CONTEXT_TOKENS) -> TextPlace:
    """Return a token of the training text with the passage around it, `context` words or pieces on each side."""
    wide = 4 * context if corpus.unit == "chars" else context
    space = space_between(corpus.unit)
    before = corpus.words(corpus.train[max(place - wide, 0) : place])
    after = corpus.words(corpus.train[place + 1 : place + 1 + wide])
    document = int(corpus.documents(np.array([place]))[0])
    return TextPlace(
        place=place,
        before=join(before, corpus.unit) + space,
        token=join(corpus.words(corpus.train[place : place + 1]), corpus.unit),
        after=space + join(after, corpus.unit),
        title=corpus.titles[document] if 0 <= document < len(corpus.titles) else None,
    )


def text_of(corpus: Corpus, tokens: list[int]) -> str:
    """Return tokens as text; a number outside of the vocabulary is a question mark."""
    known = (corpus.vocabulary[t] if 0 <= t < len(corpus.vocabulary) else "?" for t in tokens)
    return join(known, corpus.unit)


def column_name(corpus: Corpus | None, column: str, value: Any) -> str | None:
    """Return the name of a value of the columns `token` and `document`; None for other columns or without a text."""
    if corpus is None or not isinstance(value, int) or value < 0:
        return None
    if column == "token" and value < len(corpus.vocabulary):
        return visible(corpus.vocabulary[value])
    if column == "document" and value < len(corpus.titles):
        return corpus.titles[value]
    return None
