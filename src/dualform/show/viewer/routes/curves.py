"""Sorted attention per group, strongest first, as in the paper's figures."""

from typing import Any, cast

from dualform.engine.measures import Of
from dualform.show.viewer.ask import Ask
from dualform.show.viewer.questions import question
from dualform.show.viewer.session import By, Session, Subject, group_name

STRONGEST = 500
MOST_GROUPS = 40


@question("/api/curves")
def curves(session: Session, ask: Ask) -> dict[str, Any]:
    """Return each group's strongest patterns in one layer."""
    return sorted_attention(
        session,
        ask.subject(session),
        ask.layer(session),
        ask.by(session),
        of=ask.choice("of", ("attention", "magnitude")),
        count=ask.number("k", STRONGEST, low=1, high=STRONGEST),
        row=ask.optional("row"),
    )


def sorted_attention(
    session: Session, subject: Subject, layer: str, by: By, *, of: str, count: int, row: int | None = None
) -> dict[str, Any]:
    """Return the values of each group's strongest patterns, (G, k), and their groups."""
    spotlight, _ = session.spotlight(subject, row=row)
    answer = spotlight[layer].top(count, by=list(by), of=cast("Of", of), columns=())
    rows = [[value for value in line if value == value] for line in answer.values[0].tolist()]  # NaN: there are fewer
    order = sorted(range(len(rows)), key=lambda g: -(rows[g][0] if rows[g] else float("-inf")))[:MOST_GROUPS]
    shown = sorted(order)
    return {
        "layer": layer,
        "of": of,
        "groups": [answer.groups[g] for g in shown],
        "names": [group_name(session, by, answer.groups[g]) for g in shown],
        "curves": [[float(f"{value:.8g}") for value in rows[g]] for g in shown],
        "left_out": len(rows) - len(shown),
    }
