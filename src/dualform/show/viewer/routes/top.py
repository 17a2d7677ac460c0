"""The training patterns (or samples) that an input attends to most, as cards."""

from typing import Any, cast

from dualform.attend.layer import LayerSpotlight
from dualform.attend.questions import Per
from dualform.attend.removal import in_steps
from dualform.engine.measures import Of
from dualform.show.passages import PLACE, around
from dualform.show.viewer.ask import Ask, BadQuestion
from dualform.show.viewer.questions import question
from dualform.show.viewer.routes.layers import no_effects
from dualform.show.viewer.session import By, Session, Subject, group_name

MOST = 500
PER_GROUP = 4


@question("/api/top")
def top(session: Session, ask: Ask) -> dict[str, Any]:
    """Return the best patterns from rank `first` on: positive, negative, or the best of each group."""
    return best(
        session,
        ask.subject(session),
        ask.layer(session),
        tab=ask.choice("tab", ("positive", "negative", "group")),
        of=ask.choice("of", ("attention", "magnitude", "contribution", "effect")),
        per=ask.choice("per", ("pattern", "sample")),
        first=ask.number("first", 1, low=1, high=MOST),
        count=ask.number("k", 12, low=1, high=60),
        by=ask.by(session),
        steps=ask.steps("steps"),
        row=ask.optional("row"),
    )


def best(
    session: Session,
    subject: Subject,
    layer: str,
    *,
    tab: str = "positive",
    of: str = "attention",
    per: str = "pattern",
    first: int = 1,
    count: int = 12,
    by: By,
    steps: tuple[tuple[int, int], ...] = (),
    row: int | None = None,
) -> dict[str, Any]:
    """Return cards of one input's best patterns in a layer."""
    spotlight, _ = session.spotlight(subject, row=row)
    spot = spotlight[layer]
    if per == "sample" and "sample" not in session.memory.columns:
        raise BadQuestion("The run has no column named sample, so occurrences cannot be summed.")
    of = of if of != "contribution" or layer == session.output_layer else "attention"
    if of == "effect":
        if steps or no_effects(session, subject, layer) is not None:
            of = "attention"  # the moments are those of all steps
        else:
            spot = session.asked(subject, int(session.outputs(subject).argmax()))[layer]
    total = _magnitude(spot, by, of)
    if steps:
        spot = _within(session, spot, layer, steps)
    unit = int(session.outputs(subject).argmax()) if of == "contribution" else None
    last = PER_GROUP if tab == "group" else min(first + count - 1, MOST)
    answer = spot.top(
        last,
        by=list(by) if tab == "group" else None,
        of=cast("Of", of),
        per=cast("Per", per),
        largest=tab != "negative",
        unit=unit,
    )
    rows = [row for row in answer.to_arrow().to_pylist() if tab == "group" or row["rank"] >= first]
    wide = len(by) > 1
    names = [f"by_{part}" for part in by]
    return {
        "layer": layer,
        "of": of,
        "per": per,
        "tab": tab,
        "patterns": spot.count(),
        "magnitude": total,
        "cards": [
            {
                **_card(session, row, of, total),
                "group_name": None
                if tab != "group"
                else group_name(session, by, [row[n] for n in names] if wide else row[names[0]]),
                "group": None if tab != "group" else [row[n] for n in names] if wide else row[names[0]],
            }
            for row in rows
        ],
    }


def _magnitude(spot: LayerSpotlight, by: By, of: str) -> float | None:
    """Return the sum of all absolute attention, which a card's share is taken of; nothing for other measures."""
    if of in ("contribution", "effect") or not spot.queries.is_floating_point():
        return None
    return float(spot.totals(list(by), of="magnitude").values.sum())


def _within(session: Session, spot: LayerSpotlight, layer: str, steps: tuple[tuple[int, int], ...]) -> LayerSpotlight:
    return session.memory.where(in_steps(steps)).attend(queries={layer: spot.queries})[layer]


def _card(session: Session, row: dict[str, Any], of: str, total: float | None) -> dict[str, Any]:
    sample = row.get("sample")
    text = session.media.text
    place = row.get(PLACE)
    hidden = ("query", "rank", "pattern", of, "occurrences")
    return {
        "rank": row["rank"],
        "pattern": row["pattern"],
        "value": row[of],
        "share": None if not total else abs(row[of]) / total,
        "sample": sample,
        "image": isinstance(sample, int) and session.media.image(sample) is not None,
        "label": row.get("label"),
        "label_name": session.name(row["label"]) if isinstance(row.get("label"), int) else row.get("label"),
        "step": row.get("step"),
        "occurrences": row.get("occurrences"),
        "passage": around(text, place) if text is not None and isinstance(place, int) else None,
        "columns": {name: value for name, value in row.items() if name not in hidden and not name.startswith("by_")},
    }
