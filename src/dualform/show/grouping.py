"""The columns that patterns are grouped by: which there are, how an option names them, and what groups are called."""

from dataclasses import dataclass
from typing import Any

import dualform
from dualform.attend.memory import Memory
from dualform.binning import Bins
from dualform.corpus import PLACE
from dualform.engine.beside_patterns import Media
from dualform.engine.source import RANKED_ADDRESS
from dualform.errors import QueryError, SelectionError, SharesOnlyError
from dualform.show.text_places import column_name
from dualform.tokens import visible

MAX_OFFERED_GROUPS = 50_000  # of a grouping that is offered
FIRST_OFFERED = ("task,label", "label", "task", "document", "token")
"""Groupings that are offered before others, in this order."""

GroupingColumns = tuple[str | Bins, ...]
"""One entry per column: its name, or the bins that its numbers fall into."""


def parse_by(text: str) -> GroupingColumns:
    """Read a grouping as `dualform attend --by` takes it: columns separated by commas, numbers in bins of a width.

    >>> parse_by("task, label")
    ('task', 'label')
    >>> parse_by("step:500")
    (Bins(column='step', width=500.0),)
    """
    columns: list[str | Bins] = []
    for part in text.split(","):
        column, colon, width = part.strip().partition(":")
        try:
            columns.append(dualform.bins(column, width=float(width)) if colon else column)
        except ValueError as error:
            raise QueryError(
                f"Cannot group by {part.strip()!r}; expected a column, or column:width with a positive width, for "
                "example label or step:500."
            ) from error
    return tuple(columns)


@dataclass(frozen=True, slots=True)
class OfferedGrouping:
    """Columns that patterns can be grouped by, separated by commas, and the number of groups."""

    by: str
    groups: int


def annotated_columns(columns: tuple[str, ...] | list[str]) -> list[str]:
    """Return the user's columns without samples and places of a text, whose values hardly any two patterns share."""
    return [name for name in columns if name not in (*RANKED_ADDRESS, "sample", PLACE)]


def offered_groupings(memory: Memory, layer: str) -> list[OfferedGrouping]:
    """Return the columns that the patterns of a layer can be grouped by, with numbers of groups; common ones first."""
    names = annotated_columns(list(memory.columns))
    candidates = [[name] for name in names]
    if "task" in names and "label" in names:
        candidates.insert(0, ["task", "label"])
    found: list[OfferedGrouping] = []
    kept = [list(by) for by in memory.kept_groupings]
    candidates += [by for by in kept if by not in candidates]
    for columns in candidates:
        try:
            count = memory.count_groups(layer, parse_by(",".join(columns)) if columns in kept else columns)
        except (SelectionError, QueryError, SharesOnlyError):  # any other error, such as a missing file, is an answer
            continue
        if 1 < count <= MAX_OFFERED_GROUPS or columns == ["label"] or columns in kept:
            found.append(OfferedGrouping(",".join(columns), count))
    if not any(entry.by == "task" and entry.groups > 1 for entry in found):
        found = [entry for entry in found if entry.by not in ("task,label", "task")] or found
    return sorted(found, key=lambda entry: _place_in(FIRST_OFFERED, entry.by))


def default_by(memory: Memory) -> GroupingColumns:
    """Return the default grouping: the first grouping that is offered, or tenths of the steps."""
    offered = offered_groupings(memory, list(memory.layers)[-1])
    return parse_by(offered[0].by) if offered else (Bins("step", max(1, -(-memory.step // 10))),)


def _place_in(names: tuple[str, ...], name: str) -> int:
    return names.index(name) if name in names else len(names)


def unit_name(media: Media, unit: int) -> str:
    """Return the name of an output unit: its class, its token, or its number."""
    if media.labels is not None and 0 <= unit < len(media.labels):
        return str(media.labels[unit])
    if media.text is not None and 0 <= unit < len(media.text.vocabulary):
        return visible(media.text.vocabulary[unit])
    return str(unit)


def group_name(media: Media, by: GroupingColumns, group: Any) -> str:
    """Return a group as people read it: classes, tokens and documents by their names."""
    parts = list(group) if isinstance(group, list | tuple) else [group]
    names = []
    for column, part in zip(map(str, by), parts, strict=False):
        if part is None:
            names.append("(none)")
        elif column == "label" and isinstance(part, int):
            names.append(unit_name(media, part))
        else:
            names.append(column_name(media.text, column, part) or str(part))
    return " · ".join(names)
