"""Text that a terminal may be shown: whatever a run holds, nothing in it is obeyed."""

import unicodedata

_OBEYED = ("Cc", "Cf", "Cs")  # control and format characters, lone surrogates


def printable(text: str) -> str:
    r"""Return a text with every control character replaced by �; spaces, tabs and line ends stay.

    >>> printable("a\x1b[31mb\x9bc")
    'a�[31mb�c'
    """
    if text.isprintable():
        return text
    return "".join("�" if char not in "\n\t" and unicodedata.category(char) in _OBEYED else char for char in text)
