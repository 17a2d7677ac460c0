"""Progress bars on stderr, silent where stderr is no terminal.

Used while files are fetched and converted. Prints nothing else, and leaves nothing on the screen.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

Advance = Callable[[int], None]
"""Moves a bar on by so much."""


@contextmanager
def bar(title: str, *, total: int | None, unit: Literal["bytes", "steps"], show: bool) -> Iterator[Advance]:
    """Show a bar while the block runs; a total of None only shows that something is going on."""
    if not (show and sys.stderr.isatty()):
        yield lambda amount: None
        return
    from rich import progress
    from rich.console import Console

    count = progress.DownloadColumn() if unit == "bytes" else progress.MofNCompleteColumn()
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        *(() if total is None else (count,)),
        progress.TimeElapsedColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as display:
        task = display.add_task(title, total=total)
        yield lambda amount: display.advance(task, amount)
