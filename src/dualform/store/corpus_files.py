"""The text of a language model as files of its run: kept, read back, and refused where it does not fit.

A text whose tokens are not those that were recorded is refused; see `corpus_fit.py`.
"""

import json
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from dualform.corpus import Corpus, Ids
from dualform.errors import CorruptError, QueryError, RemoteError
from dualform.printable import cut
from dualform.store.attach import attach
from dualform.store.blobs import Blob
from dualform.store.corpus_fit import check_fit
from dualform.store.documents import parse_json
from dualform.store.format import CORPUS, VOCABULARY
from dualform.store.reader import Run
from dualform.store.tensors import TensorFile
from dualform.tokens import Unit


def add_corpus(run: Run, corpus: Corpus) -> None:
    """Keep a corpus in a closed run, unless it does not fit the places and tokens that were recorded."""
    check_fit(run, corpus.train)
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


def fitting_corpus(run: Run) -> Corpus:
    """Return the corpus that a run keeps, or raise where it does not fit the places and tokens that were recorded."""
    corpus = read_corpus(run)
    check_fit(run, corpus.train, digest=run.manifest.files[CORPUS].xxh3)
    return corpus


def read_corpus(run: Run) -> Corpus:
    """Return the corpus that a run keeps, whether it fits or not."""
    if CORPUS not in run.manifest.files or VOCABULARY not in run.manifest.files:
        raise QueryError(
            f"{run.name} keeps no corpus, so it cannot be asked about a text. Record with annotate(token=..., "
            "place=..., document=...) and keep the text with memory.add_corpus."
        )
    arrays = _read_tokens(run.blob(CORPUS))
    blob = run.blob(VOCABULARY)
    try:
        words = msgspec.convert(parse_json(blob.load()), _Words)
    except RemoteError:
        raise  # which says nothing of the file
    except (OSError, ValueError) as error:
        raise CorruptError(f"{blob} cannot be read: {cut(str(error), 200)}. Restore the file from a copy.") from error
    documents = len(arrays["starts"])
    if len(words.titles) != documents:
        raise CorruptError(f"{blob} has {len(words.titles)} titles for {documents} documents. Restore it from a copy.")
    return Corpus(words.name, words.unit, words.spaced, words.vocabulary, titles=words.titles, **arrays)


@dataclass(frozen=True, slots=True)
class _Words:
    """The content of the vocabulary's file."""

    name: str
    unit: Unit
    spaced: bool
    vocabulary: tuple[str, ...]
    titles: tuple[str, ...]


def _read_tokens(blob: Blob) -> dict[str, Ids]:
    """Return the tokens of both parts and the starts of documents; raise `CorruptError` where they are malformed."""
    file = TensorFile(blob)
    tensors = {name: file.tensor(name) for name in ("train", "test", "starts")}
    for name, tensor in tensors.items():
        if tensor.dim() != 1 or tensor.dtype not in (torch.int32, torch.int64) or bool((tensor < 0).any()):
            raise CorruptError(
                f"{blob}: {name!r} is {tuple(tensor.shape)} of {tensor.dtype}; expected (N,) whole numbers from 0. "
                "Restore the file from a copy of the run."
            )
    starts = tensors["starts"]
    if not len(starts) or int(starts[0]) != 0 or bool((starts.diff() <= 0).any()):
        raise CorruptError(f"{blob}: documents do not ascend from place 0. Restore the file from a copy of the run.")
    return {name: tensor.to(torch.int64).numpy() for name, tensor in tensors.items()}
