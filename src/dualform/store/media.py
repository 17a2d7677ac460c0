"""What a run keeps for people to look at: images, what labels mean, a text, test examples. Only reads.

Reading gives plain objects; nothing is drawn here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from dualform.errors import CorruptError, QueryError
from dualform.record.media import CORPUS, DESCRIPTION, IMAGES, TESTS
from dualform.store.corpus import Corpus, fitting_corpus
from dualform.store.format import opened_tensors
from dualform.store.reader import Run


@dataclass(frozen=True, slots=True, eq=False)
class Tests:
    """The test examples that a run keeps."""

    inputs: Tensor  # (M, ...)
    targets: Tensor | None  # (M,)
    images: Tensor | None  # (M, H, W[, 3]) uint8, what a person should see


def read_tests(run: Run) -> Tests:
    """Return the test examples of a run."""
    if TESTS not in run.manifest.files:
        raise QueryError(
            f"{run.folder} keeps no test examples. Add some with memory.add_tests, or give your own inputs."
        )
    tensors = _tensors(run, TESTS)
    return Tests(tensors["inputs"], tensors.get("targets"), tensors.get("images"))


class Media:
    """What a run keeps for people to look at; anything may be missing."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._description: Mapping[str, Any] = _description(run)
        self.labels: Sequence[str] | None = self._description.get("labels")
        inputs = self._description.get("inputs")
        self.scale: tuple[float, float] | None = None if inputs is None else (inputs["mean"], inputs["deviation"])

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
        tensors = _tensors(self._run, IMAGES)
        return tensors["images"], {sample: at for at, sample in enumerate(tensors["samples"].tolist())}


def _description(run: Run) -> dict[str, Any]:
    if DESCRIPTION not in run.manifest.files:
        return {}
    path = run.place(DESCRIPTION)
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorruptError(f"{path} cannot be read: {error}. Restore the file from a copy of the run.") from error
    return found


def _tensors(run: Run, name: str) -> dict[str, Tensor]:
    with opened_tensors(run.place(name)) as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
