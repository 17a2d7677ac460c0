"""Text that a terminal may be shown: whatever a run holds, nothing in it is obeyed."""

import unicodedata

MAX_SHOWN = 60
"""Number of characters of a foreign text that a message shows."""
_OBEYED = ("Cc", "Cf", "Cs")  # control and format characters, lone surrogates


def printable(text: str) -> str:
    r"""Return a text with every control character replaced by �; spaces, tabs and line ends stay.

    >>> printable("a\x1b[31mb\x9bc")
    'a�[31mb�c'
    """
    if text.isprintable():
        return text
    return "".join("�" if char not in "\n\t" and unicodedata.category(char) in _OBEYED else char for char in text)


def cut(text: str, most: int = MAX_SHOWN) -> str:
    """Return a text on one line that is short enough for a message."""
    line = " ".join(text[: most + 1].split())
    return line if len(text) <= most else f"{line[:most]}..."
