"""The answer of `dualform mask`: which predictions change without some patterns, and how a terminal shows it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dualform.attend.memory import Memory, undecided_text
from dualform.printable import printable
from dualform.show.model_loading import load_inputs, load_model
from dualform.show.predictions import MASK_NOTE, compare_predictions, predict_units
from dualform.show.terminal_tables import console, percent, print_grid


@dataclass(frozen=True, slots=True)
class MaskOutcome:
    """The predictions of a model with and without some patterns, compared."""

    view: str
    tests: int
    changed: int
    accuracy_before: float | None
    accuracy_after: float | None
    flips: list[dict[str, int]]  # test, before, after (and target, where it is known)
    note: str = MASK_NOTE
    warnings: tuple[str, ...] = ()  # which parts of the model are not those of the recording
    unknown: dict[str, int] = field(default_factory=dict)  # layer -> patterns that the mask cannot decide


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
    before = predict_units(net, rows)
    after = predict_units(masked.unwarned().apply(net, layers=list(layers) or None), rows)
    flips = []
    changes = compare_predictions(before, after, targets)
    for test in changes.changed:
        flip = {"test": test, "before": int(before[test]), "after": int(after[test])}
        flips.append(flip if targets is None else {**flip, "target": int(targets[test])})
    view = masked.info().view
    return MaskOutcome(
        view,
        len(rows),
        len(flips),
        changes.accuracy_before,
        changes.accuracy_after,
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
