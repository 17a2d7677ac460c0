"""Train a language model by truncated back-propagation while it is recorded, and measure how well it predicts.

The text is cut into as many streams as a batch has rows; each update reads the next `unroll` tokens of every stream and
carries the model's state on, which is fresh again at the start of each epoch.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from dualform.corpus import Corpus
from dualform.errors import DataError
from dualform.experiments.language.plans import MODELS, LanguageRecipe, LanguageStudy, Storage
from dualform.progress import bar
from dualform.recording.recorder import Recorder

TESTED = 10  # streams that the held-out part is read in


@dataclass(frozen=True, slots=True)
class Window:
    """The tokens that one update reads.

    Attributes:
        places: (B, L) where in the training part.
        first: whether an epoch begins here, so that no state is carried over.
    """

    places: Tensor
    first: bool


def fit(recipe: LanguageRecipe, corpus: Corpus) -> LanguageRecipe:
    """Return the recipe with no more streams than the text has for one update.

    Raises:
        DataError: the text is shorter than one unroll.
    """
    rows = (len(corpus.train) - 1) // recipe.unroll
    if rows < 1:
        raise DataError(
            f"The training part of {corpus.name} has {len(corpus.train)} {corpus.unit}; one unroll takes "
            f"{recipe.unroll} and the one that follows. Give a longer text."
        )
    return replace(recipe, batch=min(recipe.batch, rows))


def windows(corpus: Corpus, recipe: LanguageRecipe) -> Iterator[Window]:
    """Yield the tokens of every update, epoch after epoch."""
    length = (len(corpus.train) - 1) // recipe.batch
    starts = torch.arange(recipe.batch)[:, None] * length  # (B, 1)
    steps = torch.arange(recipe.unroll)[None]  # (1, L)
    done = 0
    while done < recipe.updates:
        for window in range(min(length // recipe.unroll, recipe.updates - done)):
            yield Window(starts + window * recipe.unroll + steps, window == 0)
            done += 1


def make_language_model(study: LanguageStudy, corpus: Corpus) -> nn.Module:
    """Make a study's model."""
    model = MODELS[study.model]
    return model.make(**model.arguments(study.recipe, len(corpus.vocabulary)))


class Trainer:
    """A model in training, with its optimizer and everything else that an update needs."""

    def __init__(self, study: LanguageStudy, corpus: Corpus, *, seed: int, device: str) -> None:
        torch.manual_seed(seed)
        self.recipe = study.recipe
        self.corpus = corpus
        self.device = device
        torch.backends.cudnn.allow_tf32 = False  # its LSTM would round the gates to 10 bits, and errors with them
        self.model = make_language_model(study, corpus).to(device).train()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=study.recipe.learning_rate)
        self.tokens = torch.from_numpy(corpus.train)
        self.documents = torch.from_numpy(corpus.documents(np.arange(len(corpus.train))))
        self.state: Any = None

    def update(self, window: Window, recorder: Recorder | None) -> None:
        """Make one update, recorded where there is a recorder."""
        inputs = self.tokens[window.places]  # (B, L)
        targets = self.tokens[window.places + 1].to(self.device)
        state = None if window.first or self.state is None else tuple(part.detach() for part in self.state)
        if recorder is not None:
            recorder.annotate(token=inputs, place=window.places, document=self.documents[window.places])
        logits, self.state = self.model(inputs.to(self.device), state)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        if self.recipe.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()


def train_language_model(
    study: LanguageStudy,
    corpus: Corpus,
    folder: Path,
    storage: Storage,
    *,
    recorded: int,
    seed: int,
    device: str,
    tick: Callable[[float], None] = lambda seconds: None,
) -> nn.Module:
    """Train a model from scratch, recording its last updates to `folder`, and keep the text there.

    Patterns are annotated with `token`, `place` and `document`, whole numbers that the kept corpus explains.

    Args:
        study: what to train.
        corpus: the text.
        folder: the run folder to make.
        storage: what to store.
        recorded: how many updates are recorded, the last ones.
        seed: of the model and its dropout.
        device: where to train.
        tick: called with the seconds that each update took.
    """
    trainer = Trainer(study, corpus, seed=seed, device=device)
    updates = list(windows(corpus, study.recipe))
    plain = len(updates) - recorded
    model = MODELS[study.model]

    def run(part: list[Window], recorder: Recorder | None) -> None:
        for window in part:
            start = time.perf_counter()
            trainer.update(window, recorder)
            tick(time.perf_counter() - start)
            advance(1)

    with bar("training", total=len(updates)) as advance:
        run(updates[:plain], None)
        recorder = dualform.record(
            trainer.model,
            trainer.optimizer,
            folder,
            layers=storage.layers,
            dtype=storage.dtype,
            strict=True,
            steps=recorded,
            factory=model.factory,
            factory_arguments=model.arguments(study.recipe, len(corpus.vocabulary)),
        )
        with recorder:
            run(updates[plain:], recorder)
    dualform.open(folder).add_corpus(corpus)
    return trainer.model.eval()


@torch.no_grad()
def held_out_loss(model: nn.Module, corpus: Corpus, *, unroll: int) -> float:
    """Return the mean cross entropy of the held-out part in nats, read in streams with the state carried on.

    A model that carries no state starts afresh every `unroll` tokens.
    """
    device = next(model.parameters()).device
    tokens = torch.from_numpy(corpus.test)
    rows = max(1, min(TESTED, (len(tokens) - 1) // unroll))
    length = (len(tokens) - 1) // rows
    places = torch.arange(rows)[:, None] * length + torch.arange(length)[None]
    total, count = 0.0, 0
    state: Any = None
    for part in places.split(unroll, dim=1):
        logits, state = model(tokens[part].to(device), state)
        targets = tokens[part + 1].to(device).flatten()
        total += float(functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum").double())
        count += part.numel()
    return total / count


def quality(loss: float, corpus: Corpus) -> tuple[str, float]:
    """Return the usual measure of a loss in nats, and its value: bits per character, or perplexity."""
    return ("bits per character", loss / math.log(2)) if corpus.unit == "chars" else ("perplexity", math.exp(loss))
