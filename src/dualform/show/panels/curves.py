"""Sorted attention per group, strongest first, as in the paper's figures."""

from dataclasses import dataclass
from typing import Any

from dualform.engine.measures import Of
from dualform.show.grouping import GroupingColumns, group_name
from dualform.show.session import Session, Subject

MAX_PATTERNS = 500  # of one group
MAX_CURVES = 40


@dataclass(frozen=True, slots=True)
class SortedAttention:
    """The strongest patterns of each group in one layer.

    Attributes:
        layer: the layer's name.
        of: "attention" or "magnitude".
        groups: the groups that are shown.
        names: the groups as people read them.
        curves: each group's values, strongest first, at most as many as were asked for.
        left_out: how many groups are not shown.
    """

    layer: str
    of: str
    groups: list[Any]
    names: list[str]
    curves: list[list[float]]
    left_out: int


def sorted_attention(
    session: Session, subject: Subject, layer: str, by: GroupingColumns, *, of: Of, count: int, row: int | None = None
) -> SortedAttention:
    """Return the values of each group's `count` strongest patterns in a layer."""
    spotlight, _ = session.spotlight(subject, row=row)
    answer = spotlight[layer].top(count, by=list(by), of=of, columns=())
    rows = [
        [value for value in line if value == value] for line in answer.values[0].tolist()
    ]  # NaN fills up groups of fewer patterns
    order = sorted(range(len(rows)), key=lambda g: -(rows[g][0] if rows[g] else float("-inf")))[:MAX_CURVES]
    shown = sorted(order)
    return SortedAttention(
        layer=layer,
        of=of,
        groups=[answer.groups[g] for g in shown],
        names=[group_name(session.media, by, answer.groups[g]) for g in shown],
        curves=[[float(f"{value:.8g}") for value in rows[g]] for g in shown],
        left_out=len(rows) - len(shown),
    )
