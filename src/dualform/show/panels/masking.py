"""The effect of a mask on the predictions for all test examples, and the number of patterns that it removes."""

from dataclasses import dataclass

from dualform.attend.memory import undecided_text
from dualform.show.predictions import MASK_NOTE, compare_predictions, predict_units
from dualform.show.session import Mask, Session

MAX_CHANGED = 1000  # test examples that are listed


@dataclass(frozen=True, slots=True)
class MaskEffect:
    """The predictions for every test with and without a mask, compared.

    Attributes:
        tests: how many tests there are.
        changed: for how many of them the prediction changes.
        flips: the numbers of these tests, the first thousand.
        accuracy_before: the share of right predictions of the trained model; None without targets.
        accuracy_after: the share of right predictions under the mask.
        removed: how many patterns of the last layer the mask takes out.
        patterns: how many patterns the last layer has.
        unknown: layer -> patterns that the mask cannot decide, because their columns are not known.
        undecided: the same in words.
        note: that a mask is not a retraining.
    """

    tests: int
    changed: int
    flips: list[int]
    accuracy_before: float | None
    accuracy_after: float | None
    removed: int
    patterns: int
    unknown: dict[str, int]
    undecided: str
    note: str = MASK_NOTE


def mask_effect(session: Session, mask: Mask) -> MaskEffect:
    """Compare the predictions for every test with and without a mask; the numbers of `dualform mask`."""
    found: MaskEffect = session.answers.get(("mask", mask), lambda: _mask_effect(session, mask))
    return found


def _mask_effect(session: Session, mask: Mask) -> MaskEffect:
    before = session.predictions()
    after = before if mask.removal.nothing else predict_units(session.masked(mask), session.tests)
    changes = compare_predictions(before, after, session.targets)
    last = list(session.memory.layers)[-1]
    weights = session.weights(mask.removal.by)
    selected = weights.patterns(mask.removal, last)
    patterns = session.memory.info().layers[last]["patterns"]
    unknown = weights.unknown(mask.removal)
    if mask.layers:
        unknown = {layer: count for layer, count in unknown.items() if layer in mask.layers}
    return MaskEffect(
        tests=len(before),
        changed=len(changes.changed),
        flips=changes.changed[:MAX_CHANGED],
        accuracy_before=changes.accuracy_before,
        accuracy_after=changes.accuracy_after,
        removed=patterns - selected if mask.removal.only else selected,
        patterns=patterns,
        unknown=unknown,
        undecided=undecided_text(unknown),
    )
