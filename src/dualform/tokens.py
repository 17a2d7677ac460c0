"""From text to tokens and back: characters, or words. Pure; knows no files, vocabularies or models.

Words are split at spaces where a text has its tokens apart already (WikiText), and by words and punctuation where it
has not (a book). The end of a line (of a paragraph, in a book) is a token of its own, `<eos>`.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Literal, get_args

Unit = Literal["chars", "words"]
UNITS: tuple[Unit, ...] = get_args(Unit)
END = "<eos>"
UNKNOWN = "<unk>"

_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_PIECE = re.compile(r"\w+(?:['’-]\w+)*|[^\w\s]")


def split_lines(text: str, unit: Unit, *, spaced: bool) -> Iterator[list[str]]:
    r"""Yield the tokens of each line.

    >>> list(split_lines("Who's there?\nI.\n\n", "words", spaced=False))
    [["Who's", 'there', '?'], ['I', '.'], ['<eos>']]
    >>> list(split_lines(" Valkyria Chronicles \n", "words", spaced=True))
    [['Valkyria', 'Chronicles', '<eos>']]
    >>> list(split_lines("ab\nc", "chars", spaced=False))
    [['a', 'b', '\n'], ['c']]
    """
    if unit == "chars":
        yield from (list(line) for line in _LINE.findall(text))
        return
    lines = text.split("\n")
    ended = True  # a paragraph ends once, however many blank lines follow it
    for line in lines[:-1] if not lines[-1] else lines:
        words = line.split() if spaced else _PIECE.findall(line)
        if spaced:
            yield [*words, END]
        else:
            yield words if words or ended else [END]
            ended = not words


def split(text: str, unit: Unit) -> list[str]:
    """Return the tokens of a prompt, one line.

    >>> split("the sea.", "words")
    ['the', 'sea.']
    """
    return list(text) if unit == "chars" else text.split()


def pieces(word: str) -> list[str]:
    """Return a word's own words and punctuation marks, for one that is not known as it stands.

    >>> pieces("sea.")
    ['sea', '.']
    """
    return _PIECE.findall(word)


def join(tokens: Iterable[str], unit: Unit) -> str:
    r"""Return tokens as people read them, on one line.

    >>> join(["a", "\n", "b"], "chars"), join(["the", "sea", "<eos>"], "words")
    ('a⏎b', 'the sea ⏎')
    """
    shown = (visible(token) for token in tokens)
    return ("" if unit == "chars" else " ").join(shown)


def visible(token: str) -> str:
    """Return a token as people see it: the end of a line is a sign."""
    return "⏎" if token in ("\n", END) else token
