"""Attention along the steps of training, by group, with the errors, epochs and tasks of the run."""

from dataclasses import dataclass
from typing import Any

from dualform.binning import Bins
from dualform.show.grouping import GroupingColumns, group_name
from dualform.show.session import Session, Subject

MAX_BINS = 60  # of steps
MAX_TIMELINE_GROUPS = 20


@dataclass(frozen=True, slots=True)
class Timeline:
    """Signed totals by group and bin of steps in one layer, with the errors, epochs and tasks along the steps.

    Attributes:
        layer: the layer's name.
        width: steps per bin.
        edges: the first step of each bin, and the step after the last bin.
        groups: the groups that are shown.
        names: the groups as people read them.
        grid: total attention by group and bin.
        left_out: how many groups are not shown.
        errors: the mean norm of the last layer's values by bin, relative to the largest; None for keys only.
        epochs: the steps at which some sample came for the second, third, ... time.
        tasks: (step, task) wherever the task changed.
    """

    layer: str
    width: int
    edges: list[int]
    groups: list[Any]
    names: list[str]
    grid: list[list[float]]
    left_out: int
    errors: list[float] | None
    epochs: tuple[int, ...]
    tasks: tuple[tuple[int, Any], ...]


def attention_timeline(
    session: Session, subject: Subject, layer: str, by: GroupingColumns, *, row: int | None = None
) -> Timeline:
    """Return how much an input attends in a layer to each group's patterns of each bin of steps."""
    width = _bin_width(session)
    history = session.answers.get(("history", width), lambda: session.memory.training_history(width=width))
    spotlight, _ = session.spotlight(subject, row=row)
    answer = spotlight[layer].totals([*by, Bins("step", width)])
    bins = max(len(history.edges) - 1, 1)
    grid: dict[Any, list[float]] = {}
    for label, value in zip(answer.groups, answer.values[0].tolist(), strict=True):
        group = label[0] if len(by) == 1 else label[:-1]
        grid.setdefault(group, [0.0] * bins)[int(label[-1]) // width] = value
    groups = list(grid)
    if len(groups) > MAX_TIMELINE_GROUPS:
        size = {group: sum(map(abs, values)) for group, values in grid.items()}
        groups = sorted(groups, key=lambda group: -size[group])[:MAX_TIMELINE_GROUPS]
    return Timeline(
        layer=layer,
        width=width,
        edges=history.edges.tolist(),
        groups=groups,
        names=[group_name(session.media, by, group) for group in groups],
        grid=[grid[group] for group in groups],
        left_out=len(grid) - len(groups),
        errors=None if history.errors is None else history.errors.tolist(),
        epochs=history.epochs,
        tasks=history.tasks,
    )


def _bin_width(session: Session) -> int:
    """Return how many steps a bin has: so many that all fit, in whole bins of those that the run keeps shares by."""
    least = max(1, -(-session.memory.step // MAX_BINS))
    parts = [part.rpartition(":") for by in session.memory.kept_groupings for part in by]
    kept = [int(float(width)) for column, _, width in parts if column == "step" and session.shares_only]
    return -(-least // kept[0]) * kept[0] if kept else least
