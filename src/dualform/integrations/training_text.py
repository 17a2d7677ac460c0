"""The text that a language model is trained on, collected row by row while it is trained.

Nobody has to walk through a data set beforehand: a row of tokens gets its places in the text when it first comes, and
has the same places whenever it comes again. Padding is no part of a row; all of it has one place per padding token.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

import dualform

PADDING = "padding"
"""The title of a document that stands for all padding by one token."""


class TrainingText:
    """The rows of tokens that were trained on so far, as one text with a document per row."""

    def __init__(self, earlier: dualform.Corpus | None = None) -> None:
        """Begin a text, or go on with the text of a run that is resumed."""
        self._tokens: list[npt.NDArray[np.int64]] = []
        self._documents: list[tuple[int, str]] = []
        self._places: dict[bytes, int] = {}
        self._size = 0
        if earlier is not None:
            ends = [*earlier.starts[1:].tolist(), len(earlier.train)]
            for start, end, title in zip(earlier.starts.tolist(), ends, earlier.titles, strict=True):
                self._first_place(earlier.train[start:end], title)

    def __len__(self) -> int:
        return self._size

    def places(self, tokens: Tensor, mask: Tensor | None, titles: list[str]) -> npt.NDArray[np.int64]:
        """Return the place of each token of a batch in the text, (B, L); rows that are new are added to the text.

        Args:
            tokens: (B, L).
            mask: (B, L) false or 0 where a token is padding; None for no padding.
            titles: (B,) what the rows are called.
        """
        rows = tokens.detach().cpu().numpy().astype(np.int64)  # (B, L)
        real = np.ones(rows.shape, dtype=bool) if mask is None else mask.detach().cpu().numpy().astype(bool)
        found = np.empty(rows.shape, dtype=np.int64)
        for row, kept, places, title in zip(rows, real, found, titles, strict=True):
            own = row[kept]
            if len(own):
                places[kept] = self._first_place(own, title) + np.arange(len(own))
            for token in np.unique(row[~kept]):
                places[~kept & (row == token)] = self._first_place(np.array([token]), PADDING)
        return found

    def corpus(self, tokenizer: Any) -> dualform.Corpus:
        """Return the text so far, with the texts of its tokens as a tokenizer spells them."""
        return dualform.Corpus.from_tokens(
            np.concatenate(self._tokens), tokenizer=tokenizer, documents=self._documents, name="training data"
        )

    def _first_place(self, tokens: npt.NDArray[np.int64], title: str) -> int:
        """Return the place of a row's first token; the row is added where it is new."""
        key = tokens.tobytes()
        if key not in self._places:
            self._places[key] = self._size
            self._documents.append((self._size, title))
            self._tokens.append(tokens.copy())
            self._size += len(tokens)
        return self._places[key]
