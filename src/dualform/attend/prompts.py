"""A prompt: text from a person, as the tokens that a language model takes, and what the model says next."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dualform.attend.context import naming_failures
from dualform.attend.last_tokens import as_model_takes
from dualform.corpus import Corpus
from dualform.errors import QueryError
from dualform.logits import last_logits_of
from dualform.pieces import Tokenizer, encode_text, piece_texts, raw_piece, render_chat
from dualform.recording.estimate import forward
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


PromptLike = str | Sequence[int] | Sequence[Mapping[str, Any]] | Tensor
"""A prompt as a person gives it: a text, the numbers of its tokens, or the messages of a chat."""


def read_prompt(
    corpus: Corpus, prompt: PromptLike, *, context: int | None, tokenizer: Tokenizer | None = None
) -> Prompt:
    """Turn a prompt into tokens of the corpus' vocabulary.

    A word that is not known as it stands is tried as words and punctuation marks; a word that is still unknown is
    `<unk>`. A text in a tokenizer's pieces needs that tokenizer.

    Args:
        corpus: says what the tokens are.
        prompt: a text, the numbers of its tokens, or the messages of a chat, which need the tokenizer.
        context: how many tokens the model takes at most, if it has a limit.
        tokenizer: the tokenizer whose tokens the model was trained on.

    Raises:
        QueryError: the prompt is empty, or the model knows nothing of it.
    """
    notes: list[str] = []
    messages = _messages(prompt)
    if messages:
        prompt = render_chat(tokenizer, messages)
    if not isinstance(prompt, str):
        known = _given(corpus, prompt)
        text = join((corpus.token(token) for token in known), corpus.unit)
    elif not prompt.strip():
        raise QueryError("The prompt is empty. Give some text, for example --text 'The wolf'.")
    elif tokenizer is not None:
        text, known = prompt, _encoded(corpus, prompt, tokenizer)
    elif corpus.unit == "pieces":
        raise QueryError(
            f"The text {corpus.name!r} is in pieces of a tokenizer, which the run does not keep. Give it: "
            "tokenizer=... (--tokenizer package.module:name), or give the prompt as numbers of tokens (--token-ids)."
        )
    else:
        text = prompt
        known, notes = _known_tokens(corpus, prompt)
    if context is not None and len(known) > context:
        notes.append(f"only the last {context} of {len(known)} {corpus.unit} fit the model's context")
        known = known[-context:]
    return Prompt(text, torch.tensor(known), tuple(notes))


def _messages(prompt: PromptLike) -> list[Mapping[str, Any]]:
    """Return the messages of a prompt that is a chat; none for any other prompt."""
    if isinstance(prompt, str | Tensor):
        return []
    found = [one for one in prompt if isinstance(one, Mapping)]
    return found if len(found) == len(prompt) else []


def _given(corpus: Corpus, prompt: Sequence[Any] | Tensor) -> list[int]:
    """Return a prompt that was given as numbers of tokens."""
    plain = prompt.tolist() if isinstance(prompt, Tensor) else list(prompt)
    try:
        tokens = [operator.index(token) for token in plain]
    except TypeError as error:
        raise QueryError(f"The prompt is {prompt!r}; expected a text, or the numbers of its tokens, (L,).") from error
    _check_tokens(corpus, tokens)
    return tokens


def _encoded(corpus: Corpus, text: str, tokenizer: Tokenizer) -> list[int]:
    """Return a tokenizer's tokens of a text, if the tokenizer is the one that the corpus' tokens are from."""
    tokens = encode_text(tokenizer, text)
    _check_tokens(corpus, tokens)
    for token, piece in zip(tokens, piece_texts(tokenizer, tokens), strict=True):
        in_corpus = corpus.token(token)
        if in_corpus.strip() != piece.strip() and in_corpus != raw_piece(tokenizer, token):
            raise QueryError(
                f"This tokenizer is not that of {corpus.name}: its token {token} is {piece!r}, but in the run's "
                f"vocabulary it is {in_corpus!r}. Give the tokenizer that the model was trained with."
            )
    return tokens


def _check_tokens(corpus: Corpus, tokens: Sequence[int]) -> None:
    if not tokens:
        raise QueryError("The prompt is empty: it has no tokens. Give at least one.")
    outside = [token for token in tokens if not 0 <= token < len(corpus.vocabulary)]
    if outside:
        raise QueryError(
            f"There is no token {outside[0]} in the vocabulary of {corpus.name}, which has 0 to "
            f"{len(corpus.vocabulary) - 1}."
        )


def _known_tokens(corpus: Corpus, text: str) -> tuple[list[int], list[str]]:
    """Return the tokens of a text in characters or words, and what a person should know of them."""
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
    listed = ", ".join(repr(word) for word in dict.fromkeys(unknown))
    return known, [f"not in the vocabulary, and read as <unk>: {listed}"] if unknown else []


def next_tokens(
    model: nn.Module, corpus: Corpus, prompt: Prompt, *, count: int, batch_axis: int = 0
) -> tuple[Guess, ...]:
    """Return the tokens that the model finds most probable after a prompt."""
    logits = last_logits(model, prompt.tokens[None], batch_axis=batch_axis)[0]
    _check_outputs(len(logits), corpus)
    probabilities = logits.double().softmax(dim=0)
    best = probabilities.topk(min(count, len(probabilities)))
    return tuple(
        Guess(visible(corpus.token(token)), float(probability))
        for probability, token in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    )


def _check_outputs(outputs: int, corpus: Corpus) -> None:
    """Raise unless a model has an output for each token; one of a tokenizer's pieces may have more, as padding."""
    used = int(max((part.max() for part in (corpus.train, corpus.test) if len(part)), default=-1)) + 1
    if outputs == len(corpus.vocabulary) or (corpus.unit == "pieces" and outputs >= used):
        return
    raise QueryError(
        f"This model has {outputs:,} outputs, but the vocabulary of {corpus.name} has "
        f"{len(corpus.vocabulary):,} tokens. Give the model that was trained on this text."
    )


def go_on(
    model: nn.Module, corpus: Corpus, prompt: Prompt, *, count: int, context: int | None, batch_axis: int = 0
) -> tuple[str, tuple[str, ...]]:
    """Return the text that the model goes on with, taking the most probable token each time, and what to know of it.

    Without a known context the text may become longer than the model takes; then it ends there, and a note says so.
    """
    tokens = prompt.tokens
    said: list[int] = []
    notes: tuple[str, ...] = ()
    while len(said) < count:
        try:
            logits = last_logits(model, tokens[None], batch_axis=batch_axis)
        except QueryError as error:
            notes = (f"the model goes on for {len(said)} {corpus.unit} only. {error}",)
            break
        said.append(int(logits[0].argmax()))
        tokens = torch.cat([tokens, tokens.new_tensor(said[-1:])])
        tokens = tokens if context is None else tokens[-context:]
    return join((corpus.token(token) for token in said), corpus.unit), notes


def last_logits(model: nn.Module, tokens: Tensor, *, batch_axis: int = 0) -> Tensor:
    """Return the logits after the last token of each row, (B, L) -> (B, V), in eval mode.

    The model takes tokens (B, L), or (L, B) with `batch_axis` 1. See `outputs.py` for what it may return.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with naming_failures(tokens.shape[1]):
        outputs: Any = forward(model, as_model_takes(tokens, batch_axis).to(device))
    return last_logits_of(outputs, rows=len(tokens), length=tokens.shape[1], batch_axis=batch_axis)
