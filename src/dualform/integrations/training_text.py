"""The text that a language model is trained on, collected row by row while it is trained.

Nobody has to walk through a data set beforehand: a row of tokens gets its places in the text when it first comes, and
has the same places whenever it comes again. Padding is no part of a row; all of it has one place per padding token.
Processes that train together tell each other their new rows, so that all of them have the same text.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

import dualform

PADDING = "padding"
"""The title of a document that stands for all padding by one token."""
Rows = list[tuple[str, npt.NDArray[np.int64]]]
"""Rows of tokens, each with its title."""


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
                self._add(earlier.train[start:end], title)

    def __len__(self) -> int:
        return self._size

    def places(
        self,
        tokens: Tensor,
        mask: Tensor | None,
        titles: list[str],
        *,
        gather: Callable[[Rows], list[Rows]] = lambda rows: [rows],
    ) -> npt.NDArray[np.int64]:
        """Return the place of each token of a batch in the text, (B, L); rows that are new are added to the text.

        Args:
            tokens: (B, L).
            mask: (B, L) false or 0 where a token is padding; None for no padding.
            titles: (B,) what the rows are called.
            gather: returns the new rows of every process that trains on this text, given those of this process.
        """
        rows = tokens.detach().cpu().numpy().astype(np.int64)  # (B, L)
        real = np.ones(rows.shape, dtype=bool) if mask is None else mask.detach().cpu().numpy().astype(bool)
        new = [
            (title, piece)
            for row, kept, of_row in zip(rows, real, titles, strict=True)
            for title, piece in [(of_row, row[kept]), *((PADDING, token[None]) for token in np.unique(row[~kept]))]
            if len(piece) and piece.tobytes() not in self._places
        ]
        for of_process in gather(new):
            for title, piece in of_process:
                self._add(piece, title)
        found = np.empty(rows.shape, dtype=np.int64)
        for row, kept, places in zip(rows, real, found, strict=True):
            own = row[kept]
            if len(own):
                places[kept] = self._places[own.tobytes()] + np.arange(len(own))
            for token in np.unique(row[~kept]):
                places[~kept & (row == token)] = self._places[token.tobytes()]
        return found

    def corpus(self, tokenizer: Any) -> dualform.Corpus:
        """Return the text so far, with the texts of its tokens as a tokenizer spells them."""
        return dualform.Corpus.from_tokens(
            np.concatenate(self._tokens), tokenizer=tokenizer, documents=self._documents, name="training data"
        )

    def _add(self, tokens: npt.NDArray[np.int64], title: str) -> None:
        """Add a row to the end of the text, where it is new."""
        key = tokens.tobytes()
        if key not in self._places:
            self._places[key] = self._size
            self._documents.append((self._size, title))
            self._tokens.append(tokens.copy())
            self._size += len(tokens)
