"""From a text to a corpus: its vocabulary, its tokens as whole numbers, and where its documents start."""

from collections import Counter
from itertools import chain

import numpy as np

from dualform.corpus import Corpus, Ids
from dualform.errors import QueryError
from dualform.experiments.datasets.textset import TextSet
from dualform.tokens import SPLIT_UNITS, UNKNOWN, Unit, split_lines


def make_corpus(text: TextSet, unit: Unit | None = None) -> Corpus:
    """Return a text's tokens.

    The vocabulary is that of the training part, most frequent first, and `<unk>`. In a text that does not mark its rare
    words itself, words that come only once are `<unk>`, so that the model learns what to make of a new word.
    """
    unit = unit or text.unit
    if unit not in SPLIT_UNITS:
        raise QueryError(
            f"unit is {unit!r}; expected {' or '.join(SPLIT_UNITS)}. Make a corpus of a tokenizer's pieces with "
            "Corpus.from_tokens."
        )
    lines = list(split_lines(text.train, unit, spaced=text.spaced))
    counts = Counter(chain.from_iterable(lines))
    rare = 1 if unit == "words" and not text.spaced else 0
    known = sorted(
        (token for token, count in counts.items() if count > rare), key=lambda token: (-counts[token], token)
    )
    vocabulary = tuple(known if UNKNOWN in counts else [*known, UNKNOWN])
    token_ids = {token: number for number, token in enumerate(vocabulary)}
    unknown = token_ids[UNKNOWN]

    def encode(tokens: list[list[str]]) -> Ids:
        return np.array([token_ids.get(token, unknown) for token in chain.from_iterable(tokens)], dtype=np.int64)

    before = np.concatenate([[0], np.cumsum([len(line) for line in lines])]).astype(np.int64)  # tokens before each line
    starts = _document_starts(text, before)
    return Corpus(
        name=text.name,
        unit=unit,
        spaced=text.spaced,
        vocabulary=vocabulary,
        train=encode(lines),
        test=encode(list(split_lines(text.test, unit, spaced=text.spaced))),
        titles=tuple(starts[start] for start in sorted(starts)),
        starts=np.array(sorted(starts), dtype=np.int64),
    )


def encode_part(part: str, corpus: Corpus) -> Ids:
    """Return another part of a corpus' text in the corpus' tokens, (n,)."""
    tokens = chain.from_iterable(split_lines(part, corpus.unit, spaced=corpus.spaced))
    unknown = corpus.numbers[UNKNOWN]
    return np.array([corpus.numbers.get(token, unknown) for token in tokens], dtype=np.int64)


def _document_starts(text: TextSet, before: Ids) -> dict[int, str]:
    """Return each document's title by its first place; what stands ahead of the first title has the text's name."""
    starts = {int(before[title.line]): title.text for title in text.titles}
    first = text.titles[0].line if text.titles else None
    if any(line.strip() for line in text.train.split("\n")[:first]):
        return {0: text.name, **starts}
    later = {start: title for start, title in starts.items() if first is not None and start > before[first]}
    return {0: text.titles[0].text, **later}
