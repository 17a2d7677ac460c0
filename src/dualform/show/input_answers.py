"""The answers of `dualform attend` about inputs: totals and top patterns per layer, and how a terminal shows them."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dualform.attend.answers import EFFECT_NOTE
from dualform.attend.memory import Memory
from dualform.attend.questions import Per
from dualform.attend.spotlight import Spotlight
from dualform.binning import By
from dualform.effects.output_gradients import Quantity
from dualform.engine.measures import Of
from dualform.errors import QueryError
from dualform.printable import printable
from dualform.show.model_loading import load_inputs, load_model
from dualform.show.terminal_tables import console, print_grid

DEFAULT_TOP = 5  # patterns that are listed where nobody says how many
ALL = "*"  # in place of a layer's name: all of them together


@dataclass(frozen=True, slots=True)
class LayerAnswer:
    """One layer's answers to one input."""

    test: int
    layer: str
    patterns: int
    of: str
    totals: list[dict[str, Any]]
    top: list[dict[str, Any]]
    note: str = ""


def answer_inputs(
    memory: Memory,
    *,
    model: str | None,
    inputs: Path | None,
    tests: Sequence[int],
    layers: Sequence[str],
    by: By | None,
    of: str,
    top: int | None,
    per: str,
    largest: bool,
    quantity: str = "margin",
    accept_untrained: bool = False,
    trust: bool = False,
) -> list[LayerAnswer]:
    """Ask for totals and top patterns of the chosen inputs, per layer; of effects also over all layers together.

    Without a number of top patterns, those of layers that keep shares alone are left out.
    """
    rows, targets = load_inputs(memory, inputs)
    outside = [test for test in tests if not 0 <= test < len(rows)]
    if outside:
        raise QueryError(f"There is no input {outside[0]}; there are 0 to {len(rows) - 1}.")
    loaded = load_model(memory, model, accept_untrained=accept_untrained, trust=trust)
    net = loaded.model
    memory = memory.unwarned()
    without = [name for name, entry in memory.layers.items() if entry.store == "shares"]
    if top is None and by is None and without:
        kept = ",".join(memory.kept_groupings[0])
        raise QueryError(f"This run keeps shares and no patterns of {without[0]!r}: ask for totals, --by {kept}.")
    answers = []
    for test in tests:
        if of == "effect":
            wanted = None if targets is None else targets[test : test + 1]
            spotlight = memory.attend(
                net,
                rows[test : test + 1],
                targets=wanted,
                quantity=cast("Quantity", quantity),
                layers=list(layers) or None,
                other_model=True,  # load_model has compared it with the run; the answer carries its warnings
            )
            most = DEFAULT_TOP if top is None else top
            answers.append(_all_layers(spotlight, test, by, most, largest=largest))
        else:
            spotlight = memory.attend(net, rows[test : test + 1], layers=list(layers) or None, other_model=True)
        left = spotlight.outside() if of == "effect" else {}
        for name, layer in spotlight.layers.items():
            if name in left:
                continue
            measure = cast("Of", of)
            totals = [] if by is None else layer.totals(by, of=measure).to_arrow().to_pylist()
            most = (DEFAULT_TOP if layer.keeps_patterns else 0) if top is None else top
            best = layer.top(most, of=measure, per=cast("Per", per), largest=largest) if most else None
            found = [] if best is None else best.to_arrow().to_pylist()
            note = EFFECT_NOTE if of == "effect" else ""
            answers.append(LayerAnswer(test, name, layer.count(), of, totals, found, note))
    return [_noted(memory, answer, loaded.warnings) for answer in answers]


def _noted(memory: Memory, answer: LayerAnswer, warnings: Sequence[str]) -> LayerAnswer:
    """Return an answer with doubts about the model, and with the patterns that a mask cannot decide, in its note."""
    unknown = memory.unknown_text(None if answer.layer == ALL else answer.layer)
    return dataclasses.replace(
        answer, note=" ".join(filter(None, (*warnings, answer.note, unknown, late_queries_text(memory))))
    )


def late_queries_text(memory: Memory) -> str:
    """Return a note that queries are the final model's, for a view from an earlier step; else an empty text."""
    last = memory.info().steps
    return "" if memory.step == last else f"The queries are those of the model at the end, after step {last}."


def _all_layers(spotlight: Spotlight, test: int, by: By | None, top: int, *, largest: bool) -> LayerAnswer:
    """Return the effects on one input, summed over the layers: totals by group, and the top samples."""
    left = spotlight.outside()
    note = " ".join([EFFECT_NOTE, *(f"Layer {name!r} contributes nothing: {why}." for name, why in left.items())])
    count = sum(layer.count() for name, layer in spotlight.layers.items() if name not in left)
    totals = [] if by is None else spotlight.effects(by).to_arrow().to_pylist()
    found = []
    if top and any("sample" in layer.columns for layer in spotlight.layers.values()):
        best = spotlight.effects().top(top, largest=largest).to_arrow().to_pylist()
        found = [{"query": row["query"], "rank": rank, **row} for rank, row in enumerate(best, start=1)]
    return LayerAnswer(test, ALL, count, "effect", totals, found, note)


def show_answers(answers: Sequence[LayerAnswer]) -> None:
    """Print answers as tables."""
    screen = console()
    for answer in answers:
        for what, rows in (("total", answer.totals), ("top", answer.top)):
            if rows:
                head = [name for name in rows[0] if not (name == "query" and len({r["query"] for r in rows}) == 1)]
                where = "all layers" if answer.layer == ALL else f"layer {answer.layer}"
                title = f"input {answer.test}, {where}: {what} {answer.of} over {answer.patterns:,} patterns"
                print_grid(screen, title, head, [[row[name] for name in head] for row in rows])
                screen.print()
    for note in dict.fromkeys(answer.note for answer in answers if answer.note):
        screen.print(printable(note))
