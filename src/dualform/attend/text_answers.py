"""The answer to a question about a text: passages, documents and tokens by layer, for terminals and notebooks.

What is found, and how it reads; how it is found stands in `text.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dualform.attend.by_layer import ByLayer
from dualform.attend.passages import Passage
from dualform.attend.prompts import Guess
from dualform.drawing import notebook_html
from dualform.tokens import Unit, space_between


@dataclass(frozen=True, slots=True)
class Total:
    """A document or a token: its name, the total attention to its patterns, and how many those are."""

    name: str
    attention: float
    patterns: int


@dataclass(frozen=True, slots=True)
class TextLayer:
    """What a prompt attends to in one layer.

    Attributes:
        layer: the layer's name.
        patterns: how many there are.
        by_pattern: the passages around the most attended single patterns.
        by_total: the passages around the tokens with the largest total over all their occurrences in training.
        documents: the documents with the largest totals.
        tokens: the tokens with the largest totals.
    """

    layer: str
    patterns: int
    by_pattern: tuple[Passage, ...]
    by_total: tuple[Passage, ...]
    documents: tuple[Total, ...]
    tokens: tuple[Total, ...]


@dataclass(frozen=True, slots=True, repr=False)
class TextSpotlight(ByLayer[TextLayer]):
    """The spotlights of all layers on a prompt; `spotlight["softmax"]` is one layer's.

    Attributes:
        prompt: what was asked.
        notes: what a person should know: unknown words, a prompt that was cut, layers that were left out.
        next: what the model finds most probable as the next token.
        goes_on: the text that the model goes on with.
        unit: whether tokens are chars, words or pieces.
        layers: layer -> what the prompt attends to there.
    """

    prompt: str
    notes: tuple[str, ...]
    next: tuple[Guess, ...]
    goes_on: str
    unit: Unit
    layers: Mapping[str, TextLayer]

    @property
    def space(self) -> str:
        """What stands between the prompt and what the model goes on with."""
        return space_between(self.unit)

    def __repr__(self) -> str:
        lines = [f"{self.prompt}{self.space}[{self.goes_on}]", *(f"note: {note}" for note in self.notes)]
        for layer in self.layers.values():
            for what, passages in rankings(layer):
                lines.append(f"{layer.layer}, {what}")
                lines += [f"  {p.attention:10.4g}  {p.document}: {p.text()}" for p in passages]
        return "\n".join(lines)

    def _repr_html_(self) -> str | None:
        """Return the spotlights as HTML for a notebook, by the function that is registered for them."""
        return notebook_html(self)


def rankings(layer: TextLayer) -> list[tuple[str, tuple[Passage, ...]]]:
    """Return a layer's passages with what they are ranked by."""
    return [("by single pattern", layer.by_pattern), ("by total over a token's occurrences", layer.by_total)]
