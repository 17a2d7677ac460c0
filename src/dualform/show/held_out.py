"""Tests of a language model: prompts from the held-out text, each with the token that follows it."""

import torch
from torch import Tensor, nn

from dualform.corpus import Corpus
from dualform.errors import QueryError
from dualform.show.predictions import run_model

MAX_WINDOWS = 500
WINDOW_TOKENS = {"words": 24, "chars": 80, "pieces": 32}
"""Tokens of a prompt, by the unit of the text."""


def held_out_windows(corpus: Corpus, context: int | None = None) -> tuple[Tensor, Tensor]:
    """Return prompts from all over the held-out text, (M, L), and the token that follows each, (M,).

    Args:
        corpus: the text.
        context: how many tokens the model takes at most, if it has a limit.
    """
    length = WINDOW_TOKENS[corpus.unit] if context is None else min(context, WINDOW_TOKENS[corpus.unit])
    held = torch.from_numpy(corpus.test)
    count = min(MAX_WINDOWS, max(len(held) - 1, 0) // length)
    if not count:
        return torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    starts = torch.linspace(0, len(held) - length - 1, count).long()
    return torch.stack([held[start : start + length] for start in starts.tolist()]), held[starts + length]


def shorten_to_context(model: nn.Module, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return prompts (M, L) cut from the front, by half each time, to a length that the model takes."""
    while len(tokens):
        try:
            run_model(model, tokens[:1])
            break
        except QueryError:
            if tokens.shape[1] == 1:
                raise
            tokens = tokens[:, -(tokens.shape[1] // 2) :]
    return tokens, targets
