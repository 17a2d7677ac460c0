"""What `dualform attend` and `dualform mask` ask of a memory, and how their answers look."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from dualform.attend.answers import EFFECT_NOTE
from dualform.attend.effects_asked import Quantity
from dualform.attend.engine import Of
from dualform.attend.groups import By
from dualform.attend.layer import Per
from dualform.attend.memory import Memory, undecided_text
from dualform.attend.spotlight import Spotlight
from dualform.errors import QueryError
from dualform.experiments.training import predict
from dualform.printable import printable
from dualform.show.models import load_inputs, load_model
from dualform.show.tables import console, percent, print_grid
from dualform.torch_modes import without_gradients

ALL = "*"  # in place of a layer's name: all of them together
MASK_NOTE = "A mask removes recorded updates from the sum; the model is not retrained."


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


@dataclass(frozen=True, slots=True)
class MaskOutcome:
    """What masking changed."""

    view: str
    tests: int
    changed: int
    accuracy_before: float | None
    accuracy_after: float | None
    flips: list[dict[str, int]]  # test, before, after (and target, where it is known)
    note: str = MASK_NOTE
    warnings: tuple[str, ...] = ()  # which parts of the model are not those of the recording
    unknown: dict[str, int] = field(default_factory=dict)  # layer -> patterns that the mask cannot decide


def ask(
    memory: Memory,
    *,
    model: str | None,
    inputs: Path | None,
    tests: Sequence[int],
    layers: Sequence[str],
    by: By | None,
    of: str,
    top: int,
    per: str,
    largest: bool,
    quantity: str = "margin",
    accept_untrained: bool = False,
    trust: bool = False,
) -> list[LayerAnswer]:
    """Ask for totals and top patterns of the chosen inputs, per layer; of effects also over all layers together."""
    rows, targets = load_inputs(memory, inputs)
    outside = [test for test in tests if not 0 <= test < len(rows)]
    if outside:
        raise QueryError(f"There is no input {outside[0]}; there are 0 to {len(rows) - 1}.")
    loaded = load_model(memory, model, accept_untrained=accept_untrained, trust=trust)
    net = loaded.model
    memory = memory.unwarned()
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
                other_model=True,  # it is what the run keeps, or a warning in the answer says where it is not
            )
            answers.append(_all_layers(spotlight, test, by, top, largest=largest))
        else:
            spotlight = memory.attend(net, rows[test : test + 1], layers=list(layers) or None, other_model=True)
        left = spotlight.outside() if of == "effect" else {}
        for name, layer in spotlight.layers.items():
            if name in left:
                continue
            measure = cast("Of", of)
            totals = [] if by is None else layer.totals(by, of=measure).to_arrow().to_pylist()
            best = layer.top(top, of=measure, per=cast("Per", per), largest=largest) if top else None
            found = [] if best is None else best.to_arrow().to_pylist()
            note = EFFECT_NOTE if of == "effect" else ""
            answers.append(LayerAnswer(test, name, layer.count(), of, totals, found, note))
    return [_noted(memory, answer, loaded.warnings) for answer in answers]


def _noted(memory: Memory, answer: LayerAnswer, warnings: Sequence[str]) -> LayerAnswer:
    """Return an answer whose note also says what is doubtful about the model, and what the mask cannot decide."""
    unknown = memory.unknown_text(None if answer.layer == ALL else answer.layer)
    return dataclasses.replace(answer, note=" ".join(filter(None, (*warnings, answer.note, unknown, late(memory)))))


def late(memory: Memory) -> str:
    """Say that the model is that of the end of the recording, where the view looks back from an earlier step."""
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


@without_gradients
def compare_mask(
    memory: Memory,
    masked: Memory,
    model: str | None,
    inputs: Path | None,
    layers: Sequence[str],
    *,
    accept_untrained: bool = False,
    trust: bool = False,
) -> MaskOutcome:
    """Compare the model's predictions with and without the masked patterns."""
    rows, targets = load_inputs(memory, inputs)
    loaded = load_model(memory, model, accept_untrained=accept_untrained, trust=trust)
    net = loaded.model
    before = predict(net, rows)
    after = predict(masked.unwarned().apply(net, layers=list(layers) or None), rows)
    flips = []
    for test in (before != after).nonzero()[:, 0].tolist():
        flip = {"test": test, "before": int(before[test]), "after": int(after[test])}
        flips.append(flip if targets is None else {**flip, "target": int(targets[test])})
    accuracies = [None if targets is None else float((said == targets).double().mean()) for said in (before, after)]
    view = masked.info().view
    return MaskOutcome(
        view,
        len(rows),
        len(flips),
        accuracies[0],
        accuracies[1],
        flips,
        warnings=loaded.warnings,
        unknown=masked.unknown(list(layers) or None),
    )


def show_mask(outcome: MaskOutcome) -> None:
    """Print the outcome of a mask."""
    screen = console()
    for warning in outcome.warnings:
        screen.print(printable(warning))
    screen.print(f"{printable(outcome.view)}: {outcome.changed} of {outcome.tests} predictions change")
    if outcome.accuracy_before is not None and outcome.accuracy_after is not None:
        screen.print(f"accuracy {percent(outcome.accuracy_before)} -> {percent(outcome.accuracy_after)}")
    if outcome.flips:
        shown = outcome.flips[:20]
        print_grid(screen, "Changed", list(shown[0]), [list(flip.values()) for flip in shown])
        if len(outcome.flips) > len(shown):
            screen.print(f"... and {len(outcome.flips) - len(shown)} more (--json lists them all)")
    if outcome.unknown:
        screen.print(printable(undecided_text(outcome.unknown)))
    screen.print(outcome.note)
