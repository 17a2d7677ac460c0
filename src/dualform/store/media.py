"""Files that a run may keep beside its patterns, for people to look at: images, a text corpus, test examples.

Written whole and listed in the manifest like everything else. Reading gives plain objects; nothing is drawn here.
"""

import bisect
import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from dualform.errors import CorruptError, QueryError, RunExistsError, StoreError
from dualform.record.media import CORPUS, DESCRIPTION, IMAGES, TESTS, Files
from dualform.store.format import FileEntry, Manifest, locked, opened_tensors, publish, publish_tensors
from dualform.store.reader import Run


def publish_files(folder: Path, files: Files) -> dict[str, FileEntry]:
    """Publish files in a run folder; return their entries for the manifest, which is the caller's to change."""
    entries = {}
    for name, content in files.items():
        if isinstance(content, str):
            entries[name] = publish(folder / name, functools.partial(Path.write_text, data=content, encoding="utf-8"))
        else:
            entries[name] = publish_tensors(folder / name, content)
    return entries


def attach(run: Run, files: Files) -> None:
    """Add files to a run that nobody is recording, replacing earlier ones of the same names."""
    try:
        with locked(run.folder) as mine:
            if not mine:
                raise RunExistsError(f"{run.folder} is being recorded to. Add to it when it is closed.")
            entries = publish_files(run.folder, files)
            manifest = Manifest.read(run.folder)
            manifest = dataclasses.replace(manifest, files={**manifest.files, **entries})
            manifest.publish(run.folder)
    except OSError as error:
        if isinstance(error, RunExistsError):
            raise
        raise StoreError(f"{', '.join(files)} could not be written to {run.folder}: {error}.") from error
    run.manifest = manifest


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


@dataclass(frozen=True, slots=True)
class Text:
    """The training text of a run."""

    tokens: Tensor  # (N,)
    vocabulary: Sequence[str]
    documents: Sequence[tuple[int, str]]  # (first token, title), ascending
    joiner: str
    place: str  # the annotated column that says where in the text a pattern is

    def words(self, first: int, last: int) -> list[str]:
        """Return the text of the tokens first to last - 1, as far as there are any."""
        return [self.vocabulary[token] for token in self.tokens[max(first, 0) : max(last, 0)].tolist()]

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text; raise where one is not in the vocabulary, or there are none."""
        parts = list(text) if not self.joiner else text.split()
        if not parts:
            raise QueryError("The prompt is empty. Give at least one token.")
        known = {token: number for number, token in enumerate(self.vocabulary)}
        unknown = list(dict.fromkeys(part for part in parts if part not in known))
        spare = known.get("<unk>")
        if unknown and spare is None:
            raise QueryError(f"Not in the vocabulary: {', '.join(map(repr, unknown[:10]))}. Leave them out.")
        return [known.get(part, spare if spare is not None else -1) for part in parts]

    def title(self, place: int) -> str | None:
        """Return the title of the document that a place belongs to."""
        at = bisect.bisect_right([first for first, _ in self.documents], place) - 1
        return self.documents[at][1] if at >= 0 else None


class Media:
    """What a run keeps for people to look at; anything may be missing."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._description: Mapping[str, Any] = _description(run)
        self.labels: Sequence[str] | None = self._description.get("labels")
        inputs = self._description.get("inputs")
        self.scale: tuple[float, float] | None = None if inputs is None else (inputs["mean"], inputs["deviation"])

    @cached_property
    def text(self) -> Text | None:
        """The training text."""
        found = self._description.get("text")
        if found is None or CORPUS not in self._run.manifest.files:
            return None
        documents = [(int(first), str(title)) for first, title in found["documents"]]
        tokens = _tensors(self._run, CORPUS)["tokens"]
        return Text(tokens, found["vocabulary"], documents, found["joiner"], found["place"])

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
    path = run.folder / DESCRIPTION
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorruptError(f"{path} cannot be read: {error}. Restore the file from a copy of the run.") from error
    return found


def _tensors(run: Run, name: str) -> dict[str, Tensor]:
    with opened_tensors(run.folder / name) as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
