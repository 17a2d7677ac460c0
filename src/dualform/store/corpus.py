"""The text that a language model was trained on, kept in its run: tokens, vocabulary, documents.

A pattern's annotations are three whole numbers, `token`, `place` and `document`; this says what they mean. `place`
counts the tokens of the training part from 0: `train[place]` is the pattern's token, `train[place + 1]` what followed.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dualform.errors import CorruptError, QueryError
from dualform.store.attach import attach
from dualform.store.format import CORPUS, VOCABULARY, opened_tensors
from dualform.store.reader import Run
from dualform.tokens import UNKNOWN, Unit

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False, repr=False)
class Corpus:
    """A text as numbers.

    Attributes:
        name: what it is called.
        unit: characters or words.
        spaced: whether the text has its words and punctuation apart by spaces.
        vocabulary: (V,) every token; `<unk>` stands for all others.
        train: (N,) the training part, each token by its place in the vocabulary.
        test: (M,) the held-out part.
        titles: (D,) of the documents of the training part, in order.
        starts: (D,) the place each document starts at; the first is 0.
    """

    name: str
    unit: Unit
    spaced: bool
    vocabulary: tuple[str, ...]
    train: Ids
    test: Ids
    titles: tuple[str, ...]
    starts: Ids

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Each token's place in the vocabulary."""
        return {token: number for number, token in enumerate(self.vocabulary)}

    @property
    def unknown(self) -> int:
        """The number of `<unk>`."""
        return self.numbers[UNKNOWN]

    def documents(self, places: Ids) -> Ids:
        """Return the document that each place is in."""
        return np.searchsorted(self.starts, places, side="right") - 1

    def words(self, tokens: Ids) -> list[str]:
        """Return tokens as text."""
        return [self.vocabulary[token] for token in tokens.tolist()]

    def __repr__(self) -> str:
        return (
            f"Corpus({self.name!r}, {len(self.train):,} + {len(self.test):,} {self.unit}, "
            f"vocabulary of {len(self.vocabulary):,}, {len(self.titles):,} documents)"
        )


def add_corpus(run: Run, corpus: Corpus) -> None:
    """Keep a corpus in a closed run."""
    tensors = {
        "train": torch.from_numpy(corpus.train.astype(np.int32)),
        "test": torch.from_numpy(corpus.test.astype(np.int32)),
        "starts": torch.from_numpy(corpus.starts),
    }
    words: dict[str, Any] = {
        "name": corpus.name,
        "unit": corpus.unit,
        "spaced": corpus.spaced,
        "vocabulary": corpus.vocabulary,
        "titles": corpus.titles,
    }
    attach(run, {CORPUS: tensors, VOCABULARY: json.dumps(words, ensure_ascii=False)})


def read_corpus(run: Run) -> Corpus:
    """Return the corpus that a run keeps."""
    if CORPUS not in run.manifest.files or VOCABULARY not in run.manifest.files:
        raise QueryError(
            f"{run.folder} keeps no corpus, so it cannot be asked about a text. Record with annotate(token=..., "
            "place=..., document=...) and keep the text with memory.add_corpus."
        )
    with opened_tensors(run.folder / CORPUS) as file:
        arrays = {name: file.get_tensor(name).to(torch.int64).numpy() for name in ("train", "test", "starts")}
    path = run.folder / VOCABULARY
    try:
        words = json.loads(path.read_text("utf-8"))
        return Corpus(
            name=words["name"],
            unit=words["unit"],
            spaced=words["spaced"],
            vocabulary=tuple(words["vocabulary"]),
            titles=tuple(words["titles"]),
            **arrays,
        )
    except (OSError, ValueError, KeyError) as error:
        raise CorruptError(f"{path} cannot be read: {error}. Restore the file from a copy.") from error
