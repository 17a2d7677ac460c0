"""From text to tokens and back: characters, words, or a tokenizer's pieces. Pure; knows no files, no vocabularies.

Words are split at spaces where a text has its tokens apart already (WikiText), and by words and punctuation where it
has not (a book). The end of a line (of a paragraph, in a book) is a token of its own, `<eos>`. A tokenizer's pieces
carry their own spaces, and a text is all of them in a row; bytes that are no whole character are spelled `<0xE2>`.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Literal, get_args

Unit = Literal["chars", "words", "pieces"]
UNITS: tuple[Unit, ...] = get_args(Unit)
SPLIT_UNITS: tuple[Unit, ...] = ("chars", "words")  # into which a text is split without a tokenizer
END = "<eos>"
UNKNOWN = "<unk>"

_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_PIECE = re.compile(r"\w+(?:['’-]\w+)*|[^\w\s]")
_SPELLED = re.compile(r"(?:<0x[89A-F][0-9A-F]>)+")


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


def space_between(unit: Unit | str) -> str:
    """Return what stands between two tokens of a text: a space between words."""
    return " " if unit == "words" else ""


def join(tokens: Iterable[str], unit: Unit) -> str:
    r"""Return tokens as people read them, on one line.

    >>> join(["a", "\n", "b"], "chars"), join(["the", "sea", "<eos>"], "words")
    ('a⏎b', 'the sea ⏎')
    >>> join(["10", " <0xE2>", "<0x82><0xAC>"], "pieces")
    '10 €'
    """
    return whole_characters(space_between(unit).join(visible(token) for token in tokens))


def visible(token: str) -> str:
    """Return a token as people see it: the end of a line is a sign."""
    return "⏎" if token == END else token.replace("\n", "⏎")


def spell(piece: bytes) -> str:
    r"""Return the text of a piece of UTF-8, with bytes that are no whole character spelled out.

    >>> spell(b" caf\xc3\xa9 \xe2\x82")
    ' café <0xE2><0x82>'
    """
    escaped = piece.decode("utf-8", errors="surrogateescape")
    return "".join(f"<0x{ord(sign) - 0xDC00:02X}>" if 0xDC80 <= ord(sign) <= 0xDCFF else sign for sign in escaped)


def whole_characters(text: str) -> str:
    """Return a text in which spelled bytes that make a whole character together are that character.

    >>> whole_characters("10 <0xE2><0x82><0xAC>, <0xE2>")
    '10 €, <0xE2>'
    """
    return _SPELLED.sub(lambda found: spell(bytes.fromhex(re.sub("<0x|>", "", found[0]))), text)
