"""A tiny text that a model learns in seconds, a corpus of it, and a recorded run."""

from pathlib import Path

from torch import nn

import dualform
from dualform.corpus import Corpus
from dualform.experiments.datasets.textset import TextSet, Title
from dualform.experiments.language.corpora import make_corpus
from dualform.experiments.language.language_training import train_language_model
from dualform.experiments.language.plans import LanguageRecipe, LanguageStudy, Storage
from dualform.tokens import Unit

WHO = ("wolf", "lamb", "fox", "crow", "dog", "cat")
WHAT = ("sees", "eats", "fears")


def tiny_text(*, pages: int = 6, unit: Unit = "words") -> TextSet:
    """Return a text of some pages; what each animal does depends on the animal, so it can be learnt."""
    lines: list[str] = []
    titles: list[Title] = []
    for page in range(pages):
        titles.append(Title(len(lines), f"Page {page}"))
        for i, who in enumerate(WHO):
            whom = WHO[(i + 1 + page) % len(WHO)]
            lines.append(f"the {who} {WHAT[i % 3]} the {whom} .")
    text = "\n".join(lines) + "\n"
    return TextSet("tiny", text, "\n".join(lines[:12]) + "\n", unit=unit, spaced=True, titles=tuple(titles))


def tiny_corpus(**options: object) -> Corpus:
    """Return the tiny text's tokens."""
    return make_corpus(tiny_text(**options))  # type: ignore[arg-type]


def tiny_study(*, model: str = "transformer", updates: int = 12, storage: Storage | None = None) -> LanguageStudy:
    """Return a study that takes a second or two."""
    recipe = LanguageRecipe(units=8, embedding=8, updates=updates, batch=4, unroll=10, learning_rate=0.01)
    return LanguageStudy("text", "tiny", model, recipe, (storage or Storage(),))  # type: ignore[arg-type]


def recorded(folder: Path, **options: object) -> tuple[dualform.Memory, nn.Module]:
    """Return a recorded run of the tiny text, and its model."""
    corpus, study = tiny_corpus(), tiny_study(**options)  # type: ignore[arg-type]
    updates = study.recipe.updates
    model = train_language_model(study, corpus, folder, study.storages[0], recorded=updates, seed=0, device="cpu")
    return dualform.open(folder), model
