"""What a person should see for a training sample or a test: as files for the run folder. Pure; nothing is written here.

A file is a mapping of tensors or a JSON text, by its name in the run folder. `docs/format.md` describes them.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dualform.errors import MediaError, QueryError
from dualform.tokens import UNITS, Unit

IMAGES = "media/images.safetensors"
CORPUS = "media/corpus.safetensors"
VOCABULARY = "media/vocabulary.json"
TESTS = "media/tests.safetensors"
DESCRIPTION = "media/media.json"
PATHS = "media/paths.safetensors"  # path contributions that were asked for before the training
LARGEST = 512  # pixels a side; media are for looking at, not for training from

Files = dict[str, Mapping[str, Tensor] | str]
"""The content of files by their names in the run folder: tensors, or text."""


def media_files(
    *,
    images: Any = None,
    samples: Any = None,
    labels: Sequence[str] | None = None,
    mean: float | None = None,
    deviation: float | None = None,
    tokens: Any = None,
    vocabulary: Sequence[str] | None = None,
    documents: Sequence[tuple[int, str]] | None = None,
    unit: Unit = "chars",
) -> Files:
    """Return the media of a run as files.

    Args:
        images: (N, H, W) or (N, H, W, C) of uint8, one per training sample.
        samples: (N,) the samples' numbers, as in `annotate(sample=...)`; by default 0 to N - 1.
        labels: what the numbers of the `label` column, and of the outputs, mean.
        mean: with `deviation` says that an input is (pixel - mean) / deviation, so that a drawn one can be asked.
        deviation: see `mean`.
        tokens: (N,) the training text, as numbers into the vocabulary; `annotate(place=...)` says where a pattern is.
        vocabulary: the text of each token.
        documents: (first token, title) of each document of the training text, ascending.
        unit: whether tokens are characters, words with spaces between them, or a tokenizer's pieces with their own.
    """
    files: Files = {}
    description: dict[str, Any] = {}
    if images is not None:
        pixels = _pixels(images, "images")
        numbers = torch.arange(len(pixels)) if samples is None else torch.as_tensor(samples).to(torch.int64).cpu()
        if numbers.shape != (len(pixels),) or len(numbers.unique()) < len(numbers):
            raise MediaError(
                f"There are {len(pixels)} images; expected as many different samples, got {numbers.shape}."
            )
        files[IMAGES] = {"images": pixels, "samples": numbers}
    if labels is not None:
        description["labels"] = [str(label) for label in labels]
    if (mean is None) != (deviation is None) or deviation == 0:
        raise MediaError(
            f"mean is {mean} and deviation {deviation}; give both, with a deviation that is not 0, or none."
        )
    if mean is not None and deviation is not None:
        description["inputs"] = {"mean": float(mean), "deviation": float(deviation)}
    if (tokens is None) != (vocabulary is None):
        raise MediaError("A text needs both: tokens=(N,) numbers, and vocabulary=[...] that they stand for.")
    if tokens is not None and vocabulary is not None:
        if unit not in UNITS:
            raise MediaError(f"unit is {unit!r}; expected one of {', '.join(UNITS)}.")
        files |= _text(tokens, vocabulary, documents or [(0, "text")], unit)
    if not files and not description:
        raise MediaError("There is nothing to keep. Give images, labels, or tokens and vocabulary.")
    return {**files, DESCRIPTION: json.dumps(description)} if description or IMAGES in files else files


def example_files(inputs: Tensor, targets: Tensor | None = None, images: Any = None) -> Files:
    """Return test inputs (M, ...), their targets (M,) and what a person should see of them as a file."""
    tensors = {"inputs": inputs.detach().cpu()}
    if targets is not None:
        if len(targets) != len(inputs):
            raise QueryError(f"There are {len(inputs)} test inputs, but {len(targets)} targets. Give one per input.")
        tensors["targets"] = targets.detach().cpu()
    if images is not None:
        tensors["images"] = _pixels(images, "test images")
        if len(tensors["images"]) != len(inputs):
            raise QueryError(
                f"There are {len(inputs)} test inputs, but {len(tensors['images'])} test images. Give one per input."
            )
    return {TESTS: tensors}


def _pixels(images: Any, what: str) -> Tensor:
    pixels = torch.as_tensor(images).detach().cpu()
    fits = pixels.dim() == 3 or (pixels.dim() == 4 and pixels.shape[3] in (1, 3))
    if pixels.dtype != torch.uint8 or not fits or max(pixels.shape[1:3], default=0) > LARGEST:
        raise MediaError(
            f"The {what} are {tuple(pixels.shape)} of {pixels.dtype}; expected (N, H, W) or (N, H, W, 1 or 3) "
            f"of uint8, at most {LARGEST} pixels a side."
        )
    return pixels.squeeze(3) if pixels.dim() == 4 and pixels.shape[3] == 1 else pixels


def _text(tokens: Any, vocabulary: Sequence[str], documents: Sequence[tuple[int, str]], unit: Unit) -> Files:
    starts = [int(first) for first, _ in documents]
    if starts != sorted(set(starts)) or starts[0] != 0:
        raise MediaError(f"Documents begin at {starts[:5]} ...; expected ascending places, the first of them 0.")
    words = {
        "name": "text",
        "unit": unit,
        "spaced": True,
        "vocabulary": [str(token) for token in vocabulary],
        "titles": [str(title) for _, title in documents],
    }
    train = _tokens(tokens, vocabulary)
    return {
        CORPUS: {"train": train, "test": train[:0], "starts": torch.tensor(starts)},
        VOCABULARY: json.dumps(words, ensure_ascii=False),
    }


def _tokens(tokens: Any, vocabulary: Sequence[str]) -> Tensor:
    numbers = torch.as_tensor(tokens).detach().cpu()
    if numbers.dim() != 1 or numbers.is_floating_point():
        raise MediaError(f"tokens are {tuple(numbers.shape)} of {numbers.dtype}; expected (N,) integers.")
    if len(numbers) and not (int(numbers.min()) >= 0 and int(numbers.max()) < len(vocabulary)):
        raise MediaError(
            f"tokens run from {int(numbers.min())} to {int(numbers.max())}, but the vocabulary has {len(vocabulary)}."
        )
    return numbers.to(torch.int32)
