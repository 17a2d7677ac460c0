"""The short form of the campaign of forgeries, and that it can fail."""

from pathlib import Path
from typing import Any

import pytest

from dualform.store import manifest, shard_check
from torture import forgeries


def test_forged_runs_answer_as_before_refuse_or_fail_verify(tmp_path: Path) -> None:
    outcome = forgeries.run(tmp_path, short=True, seed=2022)
    assert not outcome.failures
    assert sum(outcome.counts[kind] for kind in ("files corrupted", "manifest fields forged", "files forged")) > 0
    assert outcome.counts["refused by our own error"] > 0


def test_a_manifest_that_is_not_checked_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "problems", lambda _: iter(()))
    _only(monkeypatch, "field", lambda what: what.endswith(("/parameters gone", "/files = {}", "/0/stop = 7")))
    outcome = forgeries.run(tmp_path, short=True, seed=2022, count=30)
    assert any("KeyError" in failure or "verify passes" in failure for failure in outcome.failures)


def test_calls_that_are_not_checked_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualform.store.shard_reading.calls_problem", lambda *_: "")
    assert shard_check.calls_problem is not None, "it is the name in the module that reads that counts"
    _only(monkeypatch, "forged", lambda what: what.startswith("calls/") and " rows[" in what)
    outcome = forgeries.run(tmp_path, short=True, seed=2022, count=30)
    assert outcome.failures


def test_a_process_that_dies_or_hangs_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os
    import time

    monkeypatch.setattr(forgeries, "HANGING", 6.0)
    asked = forgeries._ask

    def ask(folder: Path, run: Any, good: Any, case: Any, skip: Any) -> Any:
        if case.what.endswith("emptied"):
            os._exit(9)
        if case.what.endswith("zeroed"):
            time.sleep(60)
        return asked(folder, run, good, case, skip)

    monkeypatch.setattr(forgeries, "_ask", ask)
    wanted = {"initial.safetensors emptied", "initial.safetensors zeroed", "initial.safetensors deleted"}

    def is_first(what: str) -> bool:
        """Say whether a case is wanted, and the first of its name."""
        found = what in wanted
        wanted.discard(what)
        return found

    _only(monkeypatch, "corrupted", is_first)
    outcome = forgeries.run(tmp_path, short=True, seed=2022, count=30)
    assert outcome.counts["died"] == outcome.counts["hung"] == 1
    assert outcome.counts["refused by our own error"] == 1
    assert len(outcome.failures) == 2


def _only(monkeypatch: pytest.MonkeyPatch, kind: str, wanted: Any) -> None:
    """Let the campaign have only the cases of one kind whose change is wanted."""
    choose = forgeries.choose

    def chosen(runs: Any, *, count: int, seed: int) -> Any:
        every = choose(runs, count=10**9, seed=seed)
        return [case for case in every if case.kind == kind and wanted(case.what)][:count]

    monkeypatch.setattr(forgeries, "choose", chosen)
