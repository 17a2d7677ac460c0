"""Train a language model by truncated back-propagation while it is recorded, and measure how well it predicts.

The text is cut into as many streams as a batch has rows; each update reads the next `unroll` tokens of every stream and
carries the model's state on, which is fresh again at the start of each epoch.
"""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from dualform.corpus import Corpus, Ids
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
    """Yield the tokens of every update, epoch after epoch.

    Where the recipe shifts its windows, each epoch begins at a place drawn from the first `unroll` of every stream, so
    that a model that carries no state meets a token at another position each time.
    """
    length = (len(corpus.train) - 1) // recipe.batch
    places = first_places(corpus, recipe)
    generator = torch.Generator().manual_seed(0)
    done = 0
    while done < recipe.updates:
        room = min(recipe.unroll, length - recipe.unroll + 1)  # one window fits behind any of these places
        shift = int(torch.randint(room, (), generator=generator)) if recipe.shifted else 0
        for window in range(min((length - shift) // recipe.unroll, recipe.updates - done)):
            yield Window(places + (shift + window * recipe.unroll), window == 0)
            done += 1


def first_places(corpus: Corpus, recipe: LanguageRecipe) -> Tensor:
    """Return the places of the first window of an epoch without a shift, (B, L); all others lie behind them."""
    length = (len(corpus.train) - 1) // recipe.batch
    return torch.arange(recipe.batch)[:, None] * length + torch.arange(recipe.unroll)[None]


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
        # On the device too: to copy the tokens of each update there would make it wait for a GPU.
        self._tokens_there = self.tokens.to(device)
        self._first_there = first_places(corpus, study.recipe).to(device)
        self.documents = torch.from_numpy(corpus.documents(np.arange(len(corpus.train))))
        self.state: Any = None

    def update(self, window: Window, recorder: Recorder | None, *, annotate_tokens: bool = True) -> None:
        """Make one update, recorded where there is a recorder.

        Args:
            window: the tokens to read.
            recorder: records the update, with the column `place` and those that follow from it.
            annotate_tokens: whether each pattern's token is among the columns; the text at `place` tells it too.
        """
        places = self._first_there + int(window.places[0, 0])  # (B, L)
        state = None if window.first or self.state is None else tuple(part.detach() for part in self.state)
        if recorder is not None:
            tokens = {"token": self.tokens[window.places]} if annotate_tokens else {}
            recorder.annotate(**tokens, place=window.places, document=self.documents[window.places])
        logits, self.state = self.model(self._tokens_there[places], state)
        loss = functional.cross_entropy(logits.flatten(0, 1), self._tokens_there[places + 1].flatten())
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


@dataclass(frozen=True, slots=True, eq=False)
class LanguageTraining:
    """The training of a study's model as a function of a `recording`, the same to the bit whenever it is called.

    Patterns are annotated with `place` and `document`, whole numbers that the kept corpus explains. Tokens are left
    out: a run of steps keeps nothing larger than its columns, and the text has the token of each place.

    Attributes:
        study: what to train.
        corpus: the text.
        seed: of the model and its dropout.
        device: where to train.
    """

    study: LanguageStudy
    corpus: Corpus
    seed: int
    device: str

    def __call__(self, recording: Callable[..., Recorder]) -> nn.Module:
        """Train the model from scratch while it is recorded, and return it in eval mode."""
        with repeatable_kernels(self.device):
            trainer = Trainer(self.study, self.corpus, seed=self.seed, device=self.device)
            recipe = self.study.recipe
            with (
                bar("training", total=recipe.updates) as advance,
                recording(trainer.model, trainer.optimizer, strict=True) as recorder,
            ):
                for window in windows(self.corpus, recipe):
                    trainer.update(window, recorder, annotate_tokens=False)
                    advance(1)
        return trainer.model.eval()


@contextmanager
def repeatable_kernels(device: str) -> Iterator[None]:
    """Let a GPU compute the same bits each time in this block, by deterministic kernels; a CPU does so anyway.

    New memory is not filled, which these kernels do not need and which takes longer than some of them.
    """
    if not device.startswith("cuda"):
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS and cuDNN's LSTM may differ
    enabled, only_warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=only_warns)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


def record_language_training(training: LanguageTraining, folder: Path) -> nn.Module:
    """Train a model, recording facts and marks of its steps to `folder`, and keep the text there."""
    study, corpus = training.study, training.corpus
    model = MODELS[study.model]
    trained: nn.Module = dualform.record_training(
        training,
        folder,
        keep=dualform.Steps(),
        factory=model.factory,
        factory_arguments=model.arguments(study.recipe, len(corpus.vocabulary)),
    )
    dualform.open(folder).add_corpus(corpus)
    return trained


@torch.no_grad()
def held_out_loss(model: nn.Module, held_out: Ids, *, unroll: int) -> float:
    """Return the mean cross entropy of held-out tokens (M,) in nats, read in streams with the state carried on.

    A model that carries no state starts afresh every `unroll` tokens.
    """
    device = next(model.parameters()).device
    tokens = torch.from_numpy(held_out)
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
