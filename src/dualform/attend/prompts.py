"""A prompt: text from a person, as the tokens that a language model takes, and what the model says next."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dualform.errors import QueryError
from dualform.record.estimate import forward
from dualform.store.corpus import Corpus
from dualform.tokens import UNKNOWN, join, pieces, split, visible


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt as a model takes it.

    Attributes:
        text: what the person wrote.
        tokens: (L,) what the model reads, the last `context` of them.
        notes: what a person should know: unknown words, a prompt that was cut.
    """

    text: str
    tokens: Tensor
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Guess:
    """A token that may come next, and the model's probability for it."""

    token: str
    probability: float


def read_prompt(corpus: Corpus, text: str, *, context: int | None) -> Prompt:
    """Turn a text into tokens of the corpus' vocabulary.

    A word that is not known as it stands is tried as words and punctuation marks; what is still unknown is `<unk>`.

    Args:
        corpus: says what the tokens are.
        text: the prompt.
        context: how many tokens the model takes at most, if it has a limit.

    Raises:
        QueryError: the prompt is empty, or the model knows nothing of it.
    """
    if not text.strip():
        raise QueryError("The prompt is empty. Give some text, for example --text 'The wolf'.")
    known: list[int] = []
    unknown: list[str] = []
    for word in split(text, corpus.unit):
        parts = [word] if word in corpus.numbers or corpus.unit == "chars" else pieces(word) or [word]
        for part in parts:
            if part not in corpus.numbers:
                unknown.append(part)
            known.append(corpus.numbers.get(part, corpus.numbers.get(UNKNOWN, -1)))
    if len(unknown) == len(known):
        raise QueryError(
            f"Nothing of {text!r} is in the vocabulary of {corpus.name} ({len(corpus.vocabulary):,} {corpus.unit}). "
            f"Use {corpus.unit} of the text that the model was trained on."
        )
    if unknown and UNKNOWN not in corpus.numbers:
        raise QueryError(f"Not in the vocabulary: {', '.join(map(repr, dict.fromkeys(unknown)))}. Leave them out.")
    notes = []
    if unknown:
        listed = ", ".join(repr(word) for word in dict.fromkeys(unknown))
        notes.append(f"not in the vocabulary, and read as <unk>: {listed}")
    if context is not None and len(known) > context:
        notes.append(f"only the last {context} of {len(known)} {corpus.unit} fit the model's context")
        known = known[-context:]
    return Prompt(text, torch.tensor(known), tuple(notes))


def next_tokens(model: nn.Module, corpus: Corpus, prompt: Prompt, *, count: int) -> tuple[Guess, ...]:
    """Return the tokens that the model finds most probable after a prompt."""
    logits = last_logits(model, prompt.tokens[None])[0]
    if len(logits) != len(corpus.vocabulary):
        raise QueryError(
            f"This model has {len(logits):,} outputs, but the vocabulary of {corpus.name} has "
            f"{len(corpus.vocabulary):,} tokens. Give the model that was trained on this text."
        )
    probabilities = logits.double().softmax(dim=0)
    best = probabilities.topk(min(count, len(probabilities)))
    return tuple(
        Guess(visible(corpus.vocabulary[token]), float(probability))
        for probability, token in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    )


def go_on(model: nn.Module, corpus: Corpus, prompt: Prompt, *, count: int) -> str:
    """Return the text that the model goes on with, taking the most probable token each time."""
    context: int | None = getattr(model, "context", None)
    tokens = prompt.tokens
    said: list[int] = []
    for _ in range(count):
        said.append(int(last_logits(model, tokens[None])[0].argmax()))
        tokens = torch.cat([tokens, tokens.new_tensor(said[-1:])])
        tokens = tokens if context is None else tokens[-context:]
    return join((corpus.vocabulary[token] for token in said), corpus.unit)


def last_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the logits after the last token of each row, (B, L) -> (B, V), in eval mode.

    The model takes tokens (B, L) and returns logits (B, L, V), alone or first of a tuple.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return logits_of(forward(model, tokens.to(device)))[:, -1]


def logits_of(outputs: Any) -> Tensor:
    """Return the logits of a language model's outputs."""
    logits = outputs[0] if isinstance(outputs, Sequence) else outputs
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        raise QueryError("This is no language model: expected logits (B, L, V) for tokens (B, L), alone or first.")
    return logits
