"""Tables for the terminal, from answers and plain rows. Stdout gets the result and nothing else."""

import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from dualform.printable import printable

FILE_WIDTH = 120  # characters of a line if stdout is not a terminal


def console() -> Console:
    """Return the console that results go to; it takes labels in brackets literally, not as markup."""
    width = None if sys.stdout.isatty() else FILE_WIDTH
    return Console(width=width, highlight=False, soft_wrap=False, markup=False, emoji=False)


def print_grid(screen: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a title and a table of rows; numbers stand right."""
    rows = [tuple(row) for row in rows]
    table = Table(header_style="dim", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        numeric = all(isinstance(row[i], int | float) for row in rows) and bool(rows)
        table.add_column(printable(column), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(cell(value) for value in row))
    screen.print(printable(title), style="bold")
    screen.print(table)


def cell(value: Any) -> str:
    """Return a value as a table shows it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return "-" if math.isnan(value) else f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(map(cell, value)) if isinstance(value, tuple) else printable(str(value))


def percent(share: float) -> str:
    """Return a share as a percentage.

    >>> percent(0.9712)
    '97.1 %'
    """
    return "-" if math.isnan(share) else f"{100 * share:.1f} %"


def print_json(value: Any) -> None:
    """Print anything made of dataclasses, mappings, sequences and numbers as JSON."""
    sys.stdout.write(json.dumps(plain(value), indent=1) + "\n")


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it: NaN becomes null, dataclasses become objects."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if hasattr(value, "items"):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
