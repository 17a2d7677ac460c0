"""The training patterns (or samples) that an input attends to most, as cards."""

from dataclasses import dataclass
from typing import Any, Literal

from dualform.attend.layer import LayerSpotlight
from dualform.attend.questions import Per
from dualform.attend.removal import in_steps
from dualform.corpus import PLACE
from dualform.engine.measures import Of
from dualform.errors import QueryError
from dualform.show.grouping import GroupingColumns, group_name
from dualform.show.panels.layer_totals import why_no_effects
from dualform.show.session import Session, Subject
from dualform.show.text_places import TextPlace, text_around

MAX_RANK = 500
CARDS_PER_GROUP = 4
Tab = Literal["positive", "negative", "group"]


@dataclass(frozen=True, slots=True)
class Card:
    """One training pattern, or one sample over its occurrences.

    Attributes:
        rank: 1 for the best.
        pattern: the pattern's number; of a sample, its best pattern's.
        value: the attention, magnitude, contribution or effect.
        share: of the magnitude of all patterns; None for other measures.
        sample: the sample's number, where patterns have one.
        image: whether the run keeps an image of the sample.
        label: the label, where patterns have one.
        label_name: the label as people read it.
        step: the step of the pattern.
        occurrences: of a sample: how many patterns it has.
        passage: the training text around the pattern's place, where there is one.
        columns: the address and the columns of the pattern.
        group: for the tab "group", the group whose pattern this is.
        group_name: that group as people read it.
    """

    rank: int
    pattern: int
    value: float
    share: float | None
    sample: Any
    image: bool
    label: Any
    label_name: Any
    step: int | None
    occurrences: int | None
    passage: TextPlace | None
    columns: dict[str, Any]
    group: Any = None
    group_name: str | None = None


@dataclass(frozen=True, slots=True)
class TopPatterns:
    """The best patterns of one input in one layer.

    Attributes:
        layer: the layer's name.
        of: the measure that was ranked by: the one asked for, or attention if that has no answer in this layer.
        per: "pattern" or "sample".
        tab: "positive", "negative", or "group" for the best of each group.
        patterns: how many patterns were ranked.
        magnitude: the sum of all absolute attention, which shares are relative to; None for other measures.
        cards: the patterns, best first.
    """

    layer: str
    of: str
    per: str
    tab: str
    patterns: int
    magnitude: float | None
    cards: list[Card]


def top_patterns(
    session: Session,
    subject: Subject,
    layer: str,
    *,
    by: GroupingColumns,
    tab: Tab = "positive",
    of: Of = "attention",
    per: Per = "pattern",
    first: int = 1,
    count: int = 12,
    steps: tuple[tuple[int, int], ...] = (),
    row: int | None = None,
) -> TopPatterns:
    """Return cards of one input's best patterns in a layer.

    Args:
        session: the opened run.
        subject: the input.
        layer: the layer's name.
        by: the columns of the groups, for the tab "group".
        tab: the largest, the smallest, or the largest of each group.
        of: what to rank by.
        per: rank each pattern, or each sample over its occurrences.
        first: the rank of the first card.
        count: how many cards.
        steps: rank only patterns of these ranges of steps.
        row: the query row to ask about.
    """
    if per == "sample" and "sample" not in session.memory.columns:
        raise QueryError("The run has no column named sample, so occurrences cannot be summed.")
    of = _answerable(session, subject, layer, of, steps)
    if of == "effect":
        spot = session.margin_spotlight(subject, int(session.outputs(subject).argmax()))[layer]
    else:
        spot = session.spotlight(subject, row=row)[0][layer]
    whole = spot
    if steps:
        spot = session.memory.where(in_steps(steps)).attend(queries={layer: spot.queries})[layer]
    answer = spot.top(
        CARDS_PER_GROUP if tab == "group" else min(first + count - 1, MAX_RANK),
        by=list(by) if tab == "group" else None,
        of=of,
        per=per,
        largest=tab != "negative",
        unit=int(session.outputs(subject).argmax()) if of == "contribution" else None,
    )
    magnitude = _magnitude(whole, by, of)
    rows = [row for row in answer.to_arrow().to_pylist() if tab == "group" or row["rank"] >= first]
    return TopPatterns(
        layer=layer,
        of=of,
        per=per,
        tab=tab,
        patterns=spot.count(),
        magnitude=magnitude,
        cards=[_card(session, row, of, magnitude, by if tab == "group" else ()) for row in rows],
    )


def _answerable(session: Session, subject: Subject, layer: str, of: Of, steps: tuple[tuple[int, int], ...]) -> Of:
    """Return the measure to rank by: the one that was asked for, or attention if it has no answer.

    Contributions are ranked in the output layer only; the moments behind effects are those of all steps.
    """
    if of == "contribution" and layer != session.output_layer:
        return "attention"
    if of == "effect" and (steps or why_no_effects(session, subject, layer) is not None):
        return "attention"
    return of


def _magnitude(spot: LayerSpotlight, by: GroupingColumns, of: Of) -> float | None:
    """Return the sum of all absolute attention, which a card's share is relative to; None for other measures."""
    if of in ("contribution", "effect") or not spot.queries.is_floating_point():
        return None
    return float(spot.totals(list(by), of="magnitude").values.sum())


def _card(session: Session, row: dict[str, Any], of: Of, magnitude: float | None, by: GroupingColumns) -> Card:
    """Return the card of one row of an answer; with `by`, the card of a group's pattern."""
    sample, label, place = row.get("sample"), row.get("label"), row.get(PLACE)
    text = session.media.text
    hidden = ("query", "rank", "pattern", of, "occurrences")
    values = [row[f"by_{part}"] for part in by]
    group = values if len(by) > 1 else values[0] if by else None
    return Card(
        rank=row["rank"],
        pattern=row["pattern"],
        value=row[of],
        share=None if not magnitude else abs(row[of]) / magnitude,
        sample=sample,
        image=isinstance(sample, int) and session.media.image(sample) is not None,
        label=label,
        label_name=session.name(label) if isinstance(label, int) else label,
        step=row.get("step"),
        occurrences=row.get("occurrences"),
        passage=text_around(text, place) if text is not None and isinstance(place, int) else None,
        columns={name: value for name, value in row.items() if name not in hidden and not name.startswith("by_")},
        group=group,
        group_name=group_name(session.media, by, group) if by else None,
    )
