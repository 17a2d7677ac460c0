"""The files of a run folder that are no patterns, as `engine.source.RunFiles` has them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from dualform.corpus import Corpus
from dualform.engine.beside_patterns import KnownState, Tests
from dualform.recording.media import CORPUS, PATHS, Files
from dualform.store import kept_state
from dualform.store.attach import attach
from dualform.store.audit import check_files, check_key_ranges
from dualform.store.blobs import Blob
from dualform.store.corpus_files import add_corpus, fitting_corpus, read_corpus
from dualform.store.corpus_fit import check_fit
from dualform.store.format import MANIFEST
from dualform.store.media_files import StoredMedia, read_tests
from dualform.store.reader import Run
from dualform.store.tensors import TensorFile


@dataclass(frozen=True, slots=True)
class StoredFiles:
    """The files beside the patterns of one run folder."""

    run: Run

    def check(self) -> int:
        """Compare every file with its checksum, and keys with their ranges; return how many files there are."""
        count = check_files(self.run)
        check_key_ranges(self.run)
        return count

    def size(self) -> int:
        """Return how many bytes all files have."""
        return sum(entry.bytes for entry in self.run.files().values())

    def manifest_checksum(self) -> str:
        """Return the xxh3 checksum of the manifest, as hexadecimal."""
        return Blob(self.run.blobs, MANIFEST).checksum()

    def attach(self, files: Files) -> None:
        """Take more files in, or replace some; a text must fit the recorded places."""
        if isinstance(tensors := files.get(CORPUS), Mapping):
            check_fit(self.run, tensors["train"].long().numpy())
        attach(self.run, files)

    def tests(self) -> Tests:
        """Return the test inputs that the run keeps."""
        return read_tests(self.run)

    def paths(self) -> dict[str, Tensor]:
        """Return the answers to questions about the path that were asked before the training, as they were kept."""
        return TensorFile(self.run.blob(PATHS)).tensors() if PATHS in self.run.manifest.files else {}

    def media(self) -> StoredMedia:
        """Return what the run keeps for people to look at."""
        return StoredMedia(self.run)

    def corpus(self, *, fitting: bool) -> Corpus:
        """Return the text that the run keeps; with `fitting` raise where recorded places are not those of the text."""
        return fitting_corpus(self.run) if fitting else read_corpus(self.run)

    def add_corpus(self, corpus: Corpus) -> None:
        """Keep a text that fits the recorded places."""
        add_corpus(self.run, corpus)

    def known_state(self) -> KnownState | None:
        """Return what is known of the model's uncovered state at the end; None where the run says nothing of it."""
        return kept_state.known_state(self.run)

    def known_states(self) -> Sequence[tuple[int, Mapping[str, Tensor]]]:
        """Return the changing uncovered state wherever it is kept, with the number of steps after which it was so."""
        return kept_state.known_states(self.run)

    def restore(self, model: nn.Module) -> dict[str, str]:
        """Put the uncovered state into a model; return the parts that are not known, with reasons."""
        return kept_state.restore(self.run, model)
