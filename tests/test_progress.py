"""Progress on a terminal, and for somebody who is watching."""

import io
import re

import pytest

from dualform.progress import bar, watching


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_is_shown_how_far_it_is_and_the_time_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with bar("replaying (40 s when it was recorded)", total=4) as advance:
        for _ in range(4):
            advance(1)
    shown = screen.getvalue()
    assert "replaying (40 s when it was recorded)" in shown
    assert "4/4" in shown
    assert re.search(r"(0:00:0\d|-:--:--)\S*\s+\S*0:00:0\d", shown), "the time to go, and the time so far"


def test_nothing_is_written_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with bar("replaying", total=2) as advance:
        advance(2)
    assert capsys.readouterr() == ("", "")


def test_a_watcher_is_told_instead_and_may_stop_the_work() -> None:
    told: list[tuple[str, int, int | None]] = []

    def watch(title: str, done: int, total: int | None) -> None:
        told.append((title, done, total))
        if done == 2:
            raise InterruptedError

    def work() -> None:
        with watching(watch), bar("replaying", total=3) as advance:
            for _ in range(3):
                advance(1)

    with pytest.raises(InterruptedError):
        work()
    assert told == [("replaying", 0, 3), ("replaying", 1, 3), ("replaying", 2, 3)]
