"""How often patterns have to be gone through for a question, before it is asked."""

from collections import Counter
from collections.abc import Sequence

from dualform.attend.questions import Question, Top
from dualform.engine.shares import replayed_parameters
from dualform.engine.source import PatternSource

EFFECT_ROUNDS = 3
"""Rounds of jobs that a layer's effects take: what the values say about the loss, moments, and sums."""


def count_rounds(source: PatternSource, question: Question, layers: Sequence[str]) -> int:
    """Return in how many rounds, one after the other, a question's jobs come, if no sum is known from before.

    The jobs of all layers share a round. Effects take rounds of their own for each layer. Contributions of single
    patterns take one round for the outputs, which say which unit is asked for, and one for the contributions; two where
    the optimizer has no coefficients. What other layers add to a parameter that a layer shares with them is found in
    two more for each such layer.
    """
    folded = [layer for layer in layers if replayed_parameters(source, [layer])]
    if question.of == "effect":
        return EFFECT_ROUNDS * len(layers) + len(folded)
    if question.of != "contribution" or not isinstance(question, Top):
        return 1
    owners = Counter(name for entry in source.layers.values() for name in set(entry.parameters.values()))
    shared = [layer for layer in layers if any(owners[name] > 1 for name in source.layer(layer).parameters.values())]
    output = 1 + 2 * len(shared) if question.unit is None else 0
    return output + (2 if folded else 1)
