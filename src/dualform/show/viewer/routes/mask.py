"""What a mask does to all test examples, and how large it is."""

from typing import Any

from dualform.attend.memory import undecided_text
from dualform.show.ask import MASK_NOTE
from dualform.show.viewer.ask import Ask
from dualform.show.viewer.questions import question
from dualform.show.viewer.session import Mask, Session, predicted


@question("/api/mask")
def mask(session: Session, ask: Ask) -> dict[str, Any]:
    """Return accuracies before and after, the predictions that change, and the number of patterns taken out."""
    return outcome(session, ask.mask(session))


def outcome(session: Session, chosen: Mask) -> dict[str, Any]:
    """Compare the predictions for every test with and without a mask; the numbers of `dualform mask`."""
    key = ("mask", chosen)
    found: dict[str, Any] = session.answers.get(key, lambda: _compare(session, chosen))
    return found


def _compare(session: Session, chosen: Mask) -> dict[str, Any]:
    before = session.predictions()
    after = before if chosen.removal.nothing else predicted(session.masked(chosen), session.tests)
    targets = session.targets
    last = list(session.memory.layers)[-1]
    weights = session.weights(chosen.removal.by)
    selected = weights.patterns(chosen.removal, last)
    whole = session.memory.info().layers[last]["patterns"]
    unknown = weights.unknown(chosen.removal)
    if chosen.layers:
        unknown = {layer: count for layer, count in unknown.items() if layer in chosen.layers}
    changed = (before != after).nonzero()[:, 0].tolist()
    return {
        "tests": len(before),
        "changed": len(changed),
        "flips": changed[:1000],
        "accuracy_before": None if targets is None else _share(before, targets),
        "accuracy_after": None if targets is None else _share(after, targets),
        "removed": whole - selected if chosen.removal.only else selected,
        "patterns": whole,
        "unknown": unknown,
        "undecided": undecided_text(unknown),
        "note": MASK_NOTE,
    }


def _share(said: Any, targets: Any) -> float | None:
    return float((said == targets).double().mean()) if len(said) else None
