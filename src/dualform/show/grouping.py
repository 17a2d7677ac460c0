"""The columns that patterns are grouped by: read from the text of an option or a parameter."""

import dualform
from dualform.attend.groups import Bins
from dualform.errors import QueryError

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
