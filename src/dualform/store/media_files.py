"""What a run keeps for people to look at: images, what labels mean, a text, test examples. Only reads.

Reading gives plain objects; nothing is drawn here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import torch
from torch import Tensor

from dualform.corpus import Corpus
from dualform.engine.beside_patterns import Tests
from dualform.errors import CorruptError, QueryError, RemoteError
from dualform.printable import cut
from dualform.recording.media import CORPUS, DESCRIPTION, IMAGES, TESTS
from dualform.store.corpus_files import fitting_corpus
from dualform.store.documents import parse_json
from dualform.store.reader import Run
from dualform.store.tensors import TensorFile


def read_tests(run: Run) -> Tests:
    """Return the test examples of a run."""
    if TESTS not in run.manifest.files:
        raise QueryError(f"{run.name} keeps no test examples. Add some with memory.add_tests, or give your own inputs.")
    tensors = TensorFile(run.blob(TESTS)).tensors()
    found = Tests(tensors.get("inputs", _NOTHING), tensors.get("targets"), tensors.get("images"))
    if (
        found.inputs.dim() < 1
        or (found.targets is not None and found.targets.shape[:1] != found.inputs.shape[:1])
        or not _are_pixels(found.images, found.inputs)
    ):
        raise CorruptError(
            f"{run.blob(TESTS)} holds {_shapes(tensors)}; expected as many inputs as targets and images. Restore the "
            "file from a copy of the run."
        )
    return found


class StoredMedia:
    """What a run keeps for people to look at; anything may be missing."""

    def __init__(self, run: Run) -> None:
        self._run = run
        description = _description(run)
        self.labels: Sequence[str] | None = description.labels
        inputs = description.inputs
        self.scale: tuple[float, float] | None = None if inputs is None else (inputs.mean, inputs.deviation)

    @cached_property
    def text(self) -> Corpus | None:
        """The training text; one that does not fit the recorded places and tokens is an error."""
        return fitting_corpus(self._run) if CORPUS in self._run.manifest.files else None

    def image(self, sample: int) -> Tensor | None:
        """Return the image of a training sample, (H, W[, 3]), if there is one."""
        images, places = self._images
        at = places.get(sample)
        return None if at is None or images is None else images[at]

    @property
    def has_images(self) -> bool:
        """Whether there are images of training samples."""
        return self._images[0] is not None

    @cached_property
    def _images(self) -> tuple[Tensor | None, dict[int, int]]:
        if IMAGES not in self._run.manifest.files:
            return None, {}
        tensors = TensorFile(self._run.blob(IMAGES)).tensors()
        images, samples = tensors.get("images", _NOTHING), tensors.get("samples", _NOTHING)
        if samples.dim() != 1 or samples.dtype != torch.int64 or not _are_pixels(images, samples):
            raise CorruptError(
                f"{self._run.blob(IMAGES)} holds {_shapes(tensors)}; expected images (N, H, W[, 3]) of uint8 and "
                "samples (N,) of int64. Restore the file from a copy of the run."
            )
        return images, {sample: at for at, sample in enumerate(samples.tolist())}


@dataclass(frozen=True, slots=True)
class _Inputs:
    """How an input follows from a pixel: (pixel - mean) / deviation."""

    mean: float
    deviation: float


@dataclass(frozen=True, slots=True)
class _Description:
    """What the file of descriptions says."""

    labels: list[str] | None = None
    inputs: _Inputs | None = None


_NOTHING = torch.empty(())


def _description(run: Run) -> _Description:
    if DESCRIPTION not in run.manifest.files:
        return _Description()
    blob = run.blob(DESCRIPTION)
    try:
        return msgspec.convert(parse_json(blob.load()), _Description)
    except RemoteError:
        raise  # which says nothing of the file
    except (OSError, ValueError) as error:
        reason = cut(str(error), 200)
        raise CorruptError(f"{blob} cannot be read: {reason}. Restore the file from a copy of the run.") from error


def _are_pixels(images: Tensor | None, beside: Tensor) -> bool:
    """Say whether images are (N, H, W) or (N, H, W, 3) of uint8, as many as there are of something else, or none."""
    if images is None:
        return True
    fits = images.dim() == 3 or (images.dim() == 4 and images.shape[3] == 3)
    return fits and images.dtype == torch.uint8 and len(images) == len(beside)


def _shapes(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{cut(name)} {tuple(found.shape)} of {found.dtype}" for name, found in list(tensors.items())[:8])
