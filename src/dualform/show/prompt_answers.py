"""The answer of `dualform attend --text`: the passages that a prompt attends to, with doubts about the model in it."""

import dataclasses
from collections.abc import Sequence

from dualform.attend.memory import Memory
from dualform.attend.text_answers import TextSpotlight
from dualform.show.input_answers import late_queries_text
from dualform.show.model_loading import load_model
from dualform.show.tokenizers import load_tokenizer


def answer_prompt(
    memory: Memory,
    prompt: str | Sequence[int],
    *,
    model: str | None,
    layers: Sequence[str] = (),
    top: int = 5,
    tokenizer: str | None = None,
    context: int | None = None,
    accept_untrained: bool = False,
    trust: bool = False,
) -> TextSpotlight:
    """Ask which passages of the training text a prompt attends to, in each layer.

    Args:
        memory: the memory.
        prompt: a text, or the numbers of its tokens.
        model: `package.module:factory`; by default the one that the run remembers.
        layers: the layers to ask; by default all.
        top: how many passages, documents and tokens.
        tokenizer: `package.module:name` of a tokenizer, for a text in its pieces.
        context: how many tokens the model takes at most; by default as it declares.
        accept_untrained: answer with the factory's own values for what the run does not keep, instead of refusing.
        trust: call the factory that the run remembers, wherever it is defined.
    """
    pieces = None if tokenizer is None else load_tokenizer(tokenizer)
    loaded = load_model(memory, model, accept_untrained=accept_untrained, trust=trust)
    found = memory.unwarned().attend_text(
        loaded.model, prompt, layers=list(layers) or None, top=top, tokenizer=pieces, context=context, other_model=True
    )
    doubts = [*loaded.warnings, memory.unknown_text(list(found.layers)), late_queries_text(memory)]
    return dataclasses.replace(found, notes=(*filter(None, doubts), *found.notes))
