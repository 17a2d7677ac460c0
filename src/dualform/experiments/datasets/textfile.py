"""A user's own text file, as a data set: the last tenth is held out, and it is one document."""

from pathlib import Path

from dualform.errors import DataError
from dualform.experiments.datasets.textset import TextSet, Title, decode_text, hold_out
from dualform.tokens import Unit


def read_text_file(path: Path, unit: Unit) -> TextSet:
    """Read a text file.

    Raises:
        DataError: there is no such file, or it is empty, or it is not UTF-8.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Give a text file in UTF-8.") from error
    text = decode_text(content, name=str(path))
    train, test = hold_out(text, characters=max(1, len(text) // 10))
    if not train.strip() or not test.strip():
        raise DataError(f"{path} has only {len(text.strip())} characters; nothing would be left to train on.")
    return TextSet(path.stem, train, test, unit=unit, titles=(Title(0, path.name),))
