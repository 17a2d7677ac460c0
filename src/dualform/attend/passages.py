"""Passages: attended places of a text, each shown with the tokens around it; passages that overlap are one."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dualform.corpus import Corpus, Ids
from dualform.tokens import join, space_between, visible, whole_characters


@dataclass(frozen=True, slots=True)
class AttendedToken:
    """An attended token in the training text.

    Attributes:
        place: which token of the text.
        attention: of the single pattern, or the total over all of them.
        occurrences: how many patterns this token has had over training.
    """

    place: int
    attention: float
    occurrences: int


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of the training text around attended tokens.

    Attributes:
        document: its title.
        attended: its attended tokens, most attended first.
        first: the place of its first token.
        tokens: its tokens, as people read them.
        following: the token after the most attended one.
        unit: chars, words or pieces.
    """

    document: str
    attended: tuple[AttendedToken, ...]
    first: int
    tokens: tuple[str, ...]
    following: str
    unit: str

    @property
    def attention(self) -> float:
        """The attention of its most attended token."""
        return self.attended[0].attention

    @property
    def occurrences(self) -> int:
        """How many patterns its most attended token has had over training."""
        return self.attended[0].occurrences

    def pieces(self) -> list[tuple[str, bool]]:
        """Return the passage's text in pieces, each with whether it is an attended token."""
        marked = {place.place - self.first for place in self.attended}
        space = space_between(self.unit)
        single: list[tuple[str, bool]] = []
        for i, token in enumerate(self.tokens):
            single += [(space if i else "", False), (token, i in marked)]
        runs = itertools.groupby((piece for piece in single if piece[0]), key=lambda piece: piece[1])
        return [(whole_characters("".join(text for text, _ in run)), attended) for attended, run in runs]

    def text(self) -> str:
        """Return the passage on one line, its attended tokens between stars."""
        return "".join(f"**{text}**" if attended else text for text, attended in self.pieces())


def gather(places: Sequence[AttendedToken], corpus: Corpus, *, count: int, around: int) -> tuple[Passage, ...]:
    """Return the best passages, made of places that come best first.

    A place whose surroundings overlap those of a better one joins its passage, which then shows both.

    Args:
        places: attended tokens, best first.
        corpus: the text.
        count: how many passages at most.
        around: how many tokens to show on either side.
    """
    passages: list[list[AttendedToken]] = []
    for place in places:
        near = (p for p in passages if any(abs(place.place - other.place) <= 2 * around for other in p))
        passage = next(near, None)
        if passage is not None:
            passage.append(place)
        elif len(passages) < count:
            passages.append([place])
    return tuple(_join_places(found, corpus, around) for found in passages)


def _join_places(places: Sequence[AttendedToken], corpus: Corpus, around: int) -> Passage:
    token_places = [place.place for place in places]
    first = max(0, min(token_places) - around)
    last = min(len(corpus.train), max(token_places) + around + 1)
    document = int(corpus.documents(np.array(token_places[:1]))[0])
    follower = token_places[0] + 1
    return Passage(
        document=corpus.titles[document],
        attended=tuple(places),
        first=first,
        tokens=tuple(visible(token) for token in corpus.words(corpus.train[first:last])),
        following=join(corpus.words(corpus.train[follower : follower + 1]), corpus.unit),
        unit=corpus.unit,
    )


def by_document(sums: Ids, counts: Ids, corpus: Corpus, *, count: int) -> list[tuple[str, float, int]]:
    """Return the documents with the largest totals over their places: title, total, patterns."""
    documents = corpus.documents(np.arange(len(sums)))
    return _largest(documents, sums, counts, corpus.titles, count)


def by_token(sums: Ids, counts: Ids, corpus: Corpus, *, count: int) -> list[tuple[str, float, int]]:
    """Return the tokens with the largest totals over their places: token, total, patterns."""
    names = tuple(visible(token) for token in corpus.vocabulary)
    return _largest(corpus.train[: len(sums)], sums, counts, names, count)


def _largest(groups: Ids, sums: Ids, counts: Ids, names: Sequence[str], count: int) -> list[tuple[str, float, int]]:
    totals = np.bincount(groups, weights=sums, minlength=len(names))
    patterns = np.bincount(groups, weights=counts, minlength=len(names))
    seen = np.flatnonzero(patterns)
    best = seen[np.argsort(-totals[seen], kind="stable")][:count]
    return [(names[i], float(totals[i]), int(patterns[i])) for i in best.tolist()]
