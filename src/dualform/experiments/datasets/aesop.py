"""Aesop's fables, in J. H. Stickney's edition."""

from collections.abc import Mapping

from dualform.errors import DataError
from dualform.experiments.datasets.catalogue import provides
from dualform.experiments.datasets.download import BookDownload
from dualform.experiments.datasets.textset import TextSet, Title, decode_text, hold_out

FIRST_FABLE = "\nTHE WOLF AND THE LAMB\n"
AFTER_FABLES = "\nANNOUNCEMENTS\n"


@provides(
    "aesop",
    licence="public domain (US), Project Gutenberg ebook 49010",
    files={"stickney.txt": "ccc57f278fd84a9ea2193928cca1cbb14b37248c091f9b3edb7bb0b621bf9fc2"},
    remotes=(BookDownload("https://www.gutenberg.org/files/49010/49010-0.txt", first="\n[Illustration: THE WOLF, "),),
)
def build_aesop(contents: Mapping[str, bytes]) -> TextSet:
    """Aesop's fables by J. H. Stickney, 137,694 characters, of which the last tenth is held out."""
    text = decode_text(contents["stickney.txt"], name="aesop/stickney.txt")
    start, end = text.find(FIRST_FABLE), text.find(AFTER_FABLES)
    if start < 0 or end < start:
        raise DataError(
            f"aesop/stickney.txt has no {FIRST_FABLE.strip()!r} before {AFTER_FABLES.strip()!r}. Fetch it again."
        )
    fables = text[start + 1 : end + 1]
    train, test = hold_out(fables, characters=len(fables) // 10)
    return TextSet("aesop", train, test, unit="chars", titles=headings(train))


def headings(text: str) -> tuple[Title, ...]:
    """Return the fables' titles: lines in capitals."""
    lines = text.split("\n")
    return tuple(
        Title(number, line.strip())
        for number, line in enumerate(lines)
        if line == line.upper() and sum(letter.isalpha() for letter in line) > 3
    )
