"""The text that a language model was trained on: tokens, vocabulary, documents. Pure; nothing is read or written here.

A pattern's annotations are three whole numbers, `token`, `place` and `document`; a corpus says what they mean. `place`
counts the tokens of the training part from 0: `train[place]` is the pattern's token, `train[place + 1]` what followed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dualform.errors import MediaError
from dualform.pieces import Tokenizer, piece_texts, vocabulary_size
from dualform.tokens import UNITS, UNKNOWN, Unit

PLACE = "place"
TOKEN = "token"
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False, repr=False)
class Corpus:
    """A text as numbers: the tokens that a language model was trained on. Made by `Corpus.from_tokens`.

    Attributes:
        name: what it is called.
        unit: whether tokens are characters, words with spaces between them, or a tokenizer's pieces.
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

    @classmethod
    def from_tokens(
        cls,
        tokens: Any,
        *,
        tokenizer: Tokenizer | None = None,
        vocabulary: Sequence[str] | None = None,
        unit: Unit = "pieces",
        documents: Sequence[tuple[int, str]] | None = None,
        test: Any = (),
        name: str = "text",
    ) -> "Corpus":
        """Make a corpus of the tokens that a model was trained on, numbered as the model numbers them.

            corpus = dualform.Corpus.from_tokens(train_tokens, tokenizer=tokenizer, documents=[(0, "Emma"), ...])
            memory.add_corpus(corpus)

        Args:
            tokens: (N,) the training text, in the order that `annotate(place=...)` counts.
            tokenizer: an object with `encode` and `decode` that says what tokens stand for. The run keeps only the text
                of each token, so a prompt needs the tokenizer again.
            vocabulary: (V,) the text of each token instead, with its `unit`.
            unit: whether tokens are characters, words with spaces between them, or pieces that carry their own spaces.
            documents: (first place, title) of each document of the training text, ascending from place 0.
            test: (M,) a held-out text, from which viewer and report take their test examples.
            name: what the text is called.
        """
        if (tokenizer is None) == (vocabulary is None):
            raise MediaError("A corpus needs the texts of its tokens: give either tokenizer=... or vocabulary=[...].")
        if unit not in UNITS or (tokenizer is not None and unit != "pieces"):
            allowed = UNITS if tokenizer is None else ("pieces",)
            raise MediaError(f"unit is {unit!r}; expected {' or '.join(allowed)}.")
        train, held = _ids(tokens, "tokens"), _ids(test, "test tokens")
        largest = max((int(part.max()) for part in (train, held) if len(part)), default=-1)
        if tokenizer is not None:
            texts = tuple(piece_texts(tokenizer, range(max(largest + 1, vocabulary_size(tokenizer)))))
        else:
            texts = tuple(map(str, vocabulary or ()))
        if largest >= len(texts):
            raise MediaError(f"There is a token {largest}, but the vocabulary has {len(texts)}: 0 to {len(texts) - 1}.")
        pairs = [(0, name)] if documents is None else [(int(start), str(title)) for start, title in documents]
        starts = [start for start, _ in pairs]
        if not starts or starts[0] != 0 or starts != sorted(set(starts)) or starts[-1] >= max(len(train), 1):
            raise MediaError(
                f"Documents begin at {starts[:5]}; expected ascending places below {len(train)}, the first of them 0."
            )
        return cls(
            name=name,
            unit=unit,
            spaced=True,
            vocabulary=texts,
            train=train,
            test=held,
            titles=tuple(title for _, title in pairs),
            starts=np.array(starts, dtype=np.int64),
        )

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
        """Return the text of each token."""
        return [self.token(token) for token in tokens.tolist()]

    def token(self, number: int) -> str:
        """Return the text of a token; a number beyond the vocabulary, as of a model's padding, is `<number>`."""
        return self.vocabulary[number] if 0 <= number < len(self.vocabulary) else f"<{number}>"

    def __repr__(self) -> str:
        return (
            f"Corpus({self.name!r}, {len(self.train):,} + {len(self.test):,} {self.unit}, "
            f"vocabulary of {len(self.vocabulary):,}, {len(self.titles):,} documents)"
        )


def _ids(tokens: Any, what: str) -> Ids:
    """Return tokens (N,) as whole numbers."""
    found = np.asarray(tokens.detach().cpu() if isinstance(tokens, torch.Tensor) else tokens)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise MediaError(f"The {what} are {found.shape} of {found.dtype}; expected (N,) whole numbers.")
    if found.size and int(found.min()) < 0:
        raise MediaError(f"The {what} go down to {int(found.min())}; expected whole numbers from 0.")
    return found.astype(np.int64)
