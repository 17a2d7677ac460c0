"""Program text that every machine has: Python's own standard library."""

import sysconfig
from collections.abc import Mapping
from pathlib import Path

from dualform.errors import DataError
from dualform.experiments.datasets.catalogue import provides
from dualform.experiments.datasets.textset import TextSet, Title

_HELD_OUT = 10  # one file in so many is held out


@provides("standard-library", licence="PSF licence version 2", module="sysconfig")
def build_standard_library(contents: Mapping[str, bytes]) -> TextSet:
    """The modules of Python's standard library (about 5 million characters), of which every tenth is held out."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in folder.glob("*.py") if path.is_file())
    if len(files) < _HELD_OUT:
        raise DataError(f"{folder} has {len(files)} Python files; expected the source of the standard library.")
    texts = [path.read_text("utf-8") for path in files]
    train = [i for i in range(len(files)) if i % _HELD_OUT]
    line, titles = 0, []
    for i in train:
        titles.append(Title(line, files[i].name))
        line += texts[i].count("\n")
    return TextSet(
        "standard-library",
        "".join(texts[i] for i in train),
        "".join(texts[::_HELD_OUT]),
        unit="chars",
        titles=tuple(titles),
    )
