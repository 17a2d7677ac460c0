"""Attention along the steps of training, by group, with the course of the run."""

from typing import Any

from dualform.attend.groups import Bins
from dualform.show.viewer.ask import Ask
from dualform.show.viewer.questions import question
from dualform.show.viewer.session import By, Session, Subject, group_name

COLUMNS = 60
MOST_GROUPS = 20


@question("/api/time")
def time(session: Session, ask: Ask) -> dict[str, Any]:
    """Return signed totals by group and bin of steps in one layer, and what happened at which step."""
    return strip(session, ask.subject(session), ask.layer(session), ask.by(session), row=ask.optional("row"))


def strip(session: Session, subject: Subject, layer: str, by: By, *, row: int | None = None) -> dict[str, Any]:
    """Return a grid of totals, group by bin."""
    width = max(1, -(-session.memory.step // COLUMNS))
    course = session.answers.get(("course", width), lambda: session.memory.course(width=width))
    spotlight, _ = session.spotlight(subject, row=row)
    answer = spotlight[layer].totals([*by, Bins("step", width)])
    bins = max(len(course.edges) - 1, 1)
    grid: dict[Any, list[float]] = {}
    for label, value in zip(answer.groups, answer.values[0].tolist(), strict=True):
        group = label[0] if len(by) == 1 else label[:-1]
        grid.setdefault(group, [0.0] * bins)[int(label[-1]) // width] = value
    groups = list(grid)
    if len(groups) > MOST_GROUPS:
        size = {group: sum(map(abs, values)) for group, values in grid.items()}
        groups = sorted(groups, key=lambda group: -size[group])[:MOST_GROUPS]
    return {
        "layer": layer,
        "width": width,
        "edges": course.edges,
        "groups": groups,
        "names": [group_name(session, by, group) for group in groups],
        "grid": [grid[group] for group in groups],
        "left_out": len(grid) - len(groups),
        "errors": course.errors,
        "epochs": course.epochs,
        "tasks": course.tasks,
    }
