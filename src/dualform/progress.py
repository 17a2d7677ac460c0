"""Progress bars on stderr, silent where stderr is no terminal; or reports to somebody who is watching.

Used by everything that takes long. Prints nothing else, and leaves nothing on the screen. A bar inside a bar is silent.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Literal

from dualform.printable import printable

Advance = Callable[[int], None]
"""Moves a bar on by so much."""

Watcher = Callable[[str, int, int | None], None]
"""Told of every bar's title, how far it is, and its total. Stops the work by raising."""

_showing = False
_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Report all progress made in this block (and this thread) to somebody, instead of to the screen."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def _nothing(amount: int) -> None:
    pass


_SILENT = nullcontext(_nothing)


def bar(
    title: str, *, total: int | None, unit: Literal["bytes", "steps"] = "steps", show: bool = True
) -> AbstractContextManager[Advance]:
    """Show a bar while the block runs; a total of None only shows that something is going on."""
    if _watcher.get() is None and (_showing or not (show and sys.stderr.isatty())):
        return _SILENT
    return _bar(title, total, unit)


@contextmanager
def _bar(title: str, total: int | None, unit: Literal["bytes", "steps"]) -> Iterator[Advance]:
    """Tell the watcher, or show a bar, while the block runs."""
    global _showing
    watcher = _watcher.get()
    if watcher is not None:
        done = 0

        def report(amount: int) -> None:
            nonlocal done
            done += amount
            watcher(title, done, total)

        report(0)
        yield report
        return
    from rich import progress
    from rich.console import Console

    count = progress.DownloadColumn() if unit == "bytes" else progress.MofNCompleteColumn()
    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        *(() if total is None else (count, progress.TimeRemainingColumn())),
        progress.TimeElapsedColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as display:
        task = display.add_task(printable(title), total=total)
        _showing = True
        try:
            yield lambda amount: display.advance(task, amount)
        finally:
            _showing = False
