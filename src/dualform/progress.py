"""Progress bars on stderr, silent where stderr is no terminal.

Used by everything that takes long. Prints nothing else, and leaves nothing on the screen. A bar inside a bar is silent.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

Advance = Callable[[int], None]
"""Moves a bar on by so much."""

_showing = False


@contextmanager
def bar(
    title: str, *, total: int | None, unit: Literal["bytes", "steps"] = "steps", show: bool = True
) -> Iterator[Advance]:
    """Show a bar while the block runs; a total of None only shows that something is going on."""
    global _showing
    if _showing or not (show and sys.stderr.isatty()):
        yield lambda amount: None
        return
    from rich import progress
    from rich.console import Console

    count = progress.DownloadColumn() if unit == "bytes" else progress.MofNCompleteColumn()
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        *(() if total is None else (count, progress.TimeRemainingColumn())),
        progress.TimeElapsedColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as display:
        task = display.add_task(title, total=total)
        _showing = True
        try:
            yield lambda amount: display.advance(task, amount)
        finally:
            _showing = False
