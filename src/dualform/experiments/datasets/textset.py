"""Texts, split into a training and a held-out part, with the titles of their documents.

Does not know where a text comes from, and knows no vocabulary: `dualform.experiments.language.corpora` makes tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from dualform.errors import DataError
from dualform.tokens import Unit


@dataclass(frozen=True, slots=True)
class Title:
    """A document's title, and the line of the training part (from 0) that it starts with."""

    line: int
    text: str


@dataclass(frozen=True, slots=True, repr=False)
class TextSet:
    """A text.

    Attributes:
        name: the data set's name.
        train: the training part.
        test: the held-out part.
        unit: whether it is usually read by characters or by words.
        spaced: whether its words and punctuation stand apart by spaces already.
        titles: the documents of the training part, in order.
        valid: a second held-out part, by which models are chosen; empty where the text has none.
    """

    name: str
    train: str
    test: str
    unit: Unit
    spaced: bool = False
    titles: tuple[Title, ...] = ()
    valid: str = ""

    def __post_init__(self) -> None:
        for part, text in (("training", self.train), ("held-out", self.test)):
            if not text.strip():
                raise DataError(f"The {part} part of {self.name} is empty; expected some text.")

    def __repr__(self) -> str:
        return f"TextSet({self.name!r}, {len(self.train):,} + {len(self.test):,} characters)"


def decode_text(content: bytes, *, name: str) -> str:
    r"""Return the text of a file, with line ends as \n and without a byte order mark.

    Raises:
        DataError: the file is empty or is not UTF-8.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name} is not UTF-8: byte {error.start} is 0x{content[error.start]:02x}. Save it as UTF-8, for example "
            "with iconv -f latin1 -t utf-8."
        ) from error
    if not text.strip():
        raise DataError(f"{name} is empty; expected a text.")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def hold_out(text: str, *, characters: int) -> tuple[str, str]:
    """Split off the last part of the text as held out."""
    return text[:-characters], text[-characters:]
