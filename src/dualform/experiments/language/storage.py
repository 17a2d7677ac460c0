"""The bytes and the time of a run, estimated before it starts, and the choice of what to store if not all fits."""

import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dualform.corpus import Corpus
from dualform.errors import StoreError
from dualform.experiments.language.language_training import (
    Trainer,
    make_language_model,
    repeatable_kernels,
    train_language_model,
    windows,
)
from dualform.experiments.language.plans import EVERYTHING, LanguageStudy, Storage
from dualform.recording.estimate import estimate, size_text

SPARE = 0.1  # of the free disk is left alone
ANNOTATIONS = 3 * 8  # bytes a pattern at most, shared by all layers
TRIAL = 4  # updates that are timed beforehand; the first warms up
WARM_UPDATES, TIMED_UPDATES = 3, 12  # updates without recording, before a run that keeps steps


@dataclass(frozen=True, slots=True)
class Budget:
    """The storage that was chosen for a run, and its size.

    Attributes:
        storage: what is stored of which layers.
        recorded: how many updates, the last ones.
        bytes: its size on disk.
        whole: the bytes of keys and values of all layers, in the dtype of training.
        free: the free bytes of the disk.
        left_out: the parts that are not stored, in words; empty if everything is.
    """

    storage: Storage
    recorded: int
    bytes: int
    whole: int
    free: int
    left_out: str

    def __str__(self) -> str:
        text = f"{size_text(self.bytes)} of {size_text(self.free)} that are free: {self.storage}"
        return f"{text}. Left out: {self.left_out}." if self.left_out else f"{text}."


def budget(study: LanguageStudy, corpus: Corpus, folder: Path) -> Budget:
    """Choose the first storage that fits on the disk, or where none does the last, for as many updates as fit."""
    existing = next(parent for parent in [folder, *folder.absolute().parents] if parent.exists())
    free = shutil.disk_usage(existing).free
    room = int(free * (1 - SPARE))
    whole = bytes_of(study, corpus, EVERYTHING)
    for storage in study.storages:
        size = bytes_of(study, corpus, storage)
        if size <= room:
            return Budget(storage, study.recipe.updates, size, whole, free, _left_out(storage, study, 0))
    recorded = int(study.recipe.updates * room / size)
    if not recorded:
        raise StoreError(
            f"{existing} has {size_text(free)} free, and one update takes {size_text(size / study.recipe.updates)}. "
            "Make room, or choose another folder: --folder PATH."
        )
    size = size * recorded // study.recipe.updates
    left_out = _left_out(storage, study, study.recipe.updates - recorded)
    return Budget(storage, recorded, size, whole, free, left_out)


def bytes_of(study: LanguageStudy, corpus: Corpus, storage: Storage) -> int:
    """Return the bytes of a storage over all updates."""
    recipe = study.recipe
    batch = torch.zeros(1, recipe.unroll, dtype=torch.int64)
    one = estimate(make_language_model(study, corpus), batch, steps=1, layers=storage.layers, dtype=storage.dtype).total
    return recipe.updates * recipe.batch * (one + recipe.unroll * ANNOTATIONS)


def trial(study: LanguageStudy, corpus: Corpus, chosen: Budget, folder: Path, *, device: str) -> float:
    """Return the seconds that an update takes with recording, measured on a few that are thrown away."""
    seconds: list[float] = []
    few = replace(study, recipe=replace(study.recipe, updates=TRIAL))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".trial-") as scratch:
        run = Path(scratch) / "run"
        train_language_model(
            few, corpus, run, chosen.storage, recorded=TRIAL, seed=0, device=device, tick=seconds.append
        )
    return statistics.median(seconds[1:])


def plain_update_seconds(study: LanguageStudy, corpus: Corpus, *, seed: int, device: str) -> float:
    """Return the seconds that an update takes without recording, with the kernels that a replay needs."""
    recipe = replace(study.recipe, updates=WARM_UPDATES + TIMED_UPDATES)
    with repeatable_kernels(device):
        trainer = Trainer(study, corpus, seed=seed, device=device)
        for number, window in enumerate(windows(corpus, recipe)):
            if number == WARM_UPDATES:
                _finish_kernels(device)
                start = time.perf_counter()
            trainer.update(window, None)
        _finish_kernels(device)
    return (time.perf_counter() - start) / TIMED_UPDATES


def _finish_kernels(device: str) -> None:
    """Wait for a GPU to have done everything that it was given."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def announce_steps(study: LanguageStudy, seconds: float) -> str:
    """Return the sentence that the user reads before a run that keeps steps."""
    recipe = study.recipe
    return (
        f"{recipe.updates:,} updates of {recipe.batch} times {recipe.unroll} tokens, about "
        f"{duration(seconds * recipe.updates)} without recording ({seconds:.2g} s an update); recorded once, and run "
        "again for what is asked about its patterns."
    )


def announce(study: LanguageStudy, chosen: Budget, seconds: float) -> str:
    """Return the sentences that the user reads before a run starts: its size, its time, and the parts left out."""
    lines = [
        f"{study.recipe.updates:,} updates of {study.recipe.batch} times {study.recipe.unroll} tokens, "
        f"about {duration(seconds * study.recipe.updates)} ({seconds:.2g} s an update).",
        f"Disk: {chosen}",
    ]
    if chosen.whole > chosen.bytes:
        lines.append(f"Keys and values of everything, as trained, would take {size_text(chosen.whole)}.")
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """Return a time for people.

    >>> duration(45), duration(400), duration(9000)
    ('45 s', '7 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _left_out(storage: Storage, study: LanguageStudy, unrecorded: int) -> str:
    names = [name for name, what in storage.layers.items() if what == "keys"]
    parts = []
    if names:
        parts.append(f"the values of {' and '.join('every layer' if name == '*' else name for name in names)}")
    if unrecorded:
        parts.append(f"the first {unrecorded:,} of {study.recipe.updates:,} updates, which are part of the start")
    return "; ".join(parts)
