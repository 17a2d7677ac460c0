"""The command and the page of the campaigns."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from torture.outcome import Outcome

from torture import __main__ as command
from torture import page


def campaign(name: str, monkeypatch: pytest.MonkeyPatch, outcome: Outcome | Exception) -> None:
    """Put a campaign in the place of a real one."""
    module = ModuleType(f"torture.{name}")

    def run(folder: Path, *, short: bool, seed: int, count: int | None = None) -> Outcome:
        if isinstance(outcome, Exception):
            raise outcome
        assert folder.is_dir()
        return outcome

    module.run = run  # type: ignore[attr-defined]
    module.__spec__ = page.__spec__
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_figures_become_a_table_json_and_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "figures.json"
    campaign("kills", monkeypatch, Outcome("kills", {"SIGKILLs in all": 1234}, {"slowest open, s": 0.25}, [], 90.0))
    assert command.main(["--only", "kills", "--json", str(figures)]) == 0
    campaign("interrupts", monkeypatch, Outcome("interrupts", {"interrupts in all": 7}, {}, ["a thread is left"], 1.0))
    assert command.main(["--only", "interrupts", "--json", str(figures), "--short", "--seed", "5"]) == 1
    shown = capsys.readouterr()
    assert "1,234  SIGKILLs in all" in shown.out
    assert "FAILED: a thread is left" in shown.out
    assert "kills ..." in shown.err
    found = json.loads(figures.read_text())
    assert list(found) == ["kills", "interrupts"], "the second run keeps the figures of the first"
    text = page.page(found)
    assert "| SIGKILLs in all | 1,234 |" in text
    assert "| slowest open, s | 0.25 |" in text
    assert "`scripts/torture --only kills --seed 2022`" in text
    assert "`scripts/torture --only interrupts --short --seed 5`" in text
    assert "**1 failures**" in text
    assert "killed (SIGKILL), corrupted and forged run folders, a viewer with fifty clients" in text
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    assert command.main(["--page", "--json", str(figures)]) == 0
    assert (tmp_path / "page.md").read_text() == text


def test_a_campaign_that_breaks_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    campaign("kills", monkeypatch, ZeroDivisionError("in the campaign"))
    figures = tmp_path / "figures.json"
    assert command.main(["--only", "kills", "--json", str(figures)]) == 1
    assert "broke: ZeroDivisionError" in json.loads(figures.read_text())["kills"]["failures"][0]
