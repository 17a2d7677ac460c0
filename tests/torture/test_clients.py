"""The campaign of clients in its short form; and that it finds a viewer that is broken."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torture.viewer_client import References
from torture.viewer_faults import FIRST, Faults, Timeline
from torture.viewer_questions import differs, ordinary

from dualform.show.viewer.routes import questions
from torture import clients

BROKEN = """
import dualform.show.viewer.guard, dualform.show.session
dualform.show.viewer.guard.Guard._refuse = lambda self, scope: None
dualform.show.session.Session.name = lambda self, unit: "another name"
"""
"""A viewer that lets everybody in, and gives outputs wrong names."""


def test_the_short_form_finds_nothing(tmp_path: Path) -> None:
    outcome = clients.run(tmp_path / "clients", short=True, seed=2022, count=5)
    assert not outcome.failures, dataclasses.asdict(outcome)
    for name in (
        "ordinary questions answered as before the storm",
        "fuzzed questions",
        "forbidden requests refused",
        "requests broken off",
        "half-open connections closed by the viewer",
        "large bodies refused",
    ):
        assert outcome.counts[name] > 0, name
    assert outcome.measures["slowest answer, ms"] > 0


def test_a_broken_viewer_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "PRELUDE", BROKEN)
    monkeypatch.setattr(clients, "_references", _calm_references(clients._references))
    monkeypatch.setattr(clients, "STATES", (FIRST,))
    monkeypatch.setattr(Faults, "go_on", lambda self, until: None)  # the run stays as it is
    outcome = clients.run(tmp_path / "clients", short=True, seed=2022, count=3)
    assert outcome.counts["forbidden requests answered"] > 0
    assert outcome.counts["wrong answers"] > 0
    assert len(outcome.failures) >= 2


def _calm_references(take: Callable[..., References]) -> Callable[..., References]:
    """The answers before the storm are those of a viewer that is whole."""
    return lambda kept, found, folder, prelude: take(kept, found, folder, "")


def test_every_route_is_asked() -> None:
    paths = {question.path for question in ordinary()}
    assert set(questions()) <= paths
    assert {"/", "/report.html", "/api/progress"} <= paths
    assert any(path.startswith("/static/") for path in paths)
    assert any(path.startswith("/media/") for path in paths)


@pytest.mark.parametrize(
    ("found", "wanted"),
    [(1, 2), (1.0, 1.01), ([1], [1, 2]), ({"a": 1}, {"b": 1}), ("a", "b"), (None, 0.0), ([[1.0], 2], [[1.5], 2])],
)
def test_answers_that_differ_are_told_apart(found: Any, wanted: Any) -> None:
    assert differs(found, wanted) is not None
    assert differs(wanted, wanted) is None


def test_rounding_is_no_difference() -> None:
    assert differs([1.00001, {"a": 1e-7}], [1.0, {"a": 0.0}]) is None


def test_a_request_may_be_about_any_state_that_it_overlaps() -> None:
    timeline = Timeline("a")
    timeline.turn("b", statuses=(503,))
    timeline.turn("c")
    phases = timeline._phases
    begin, end = phases[1].begin, phases[2].begin
    assert timeline.during(begin - 1, begin - 0.5)[0] <= {"a"}
    assert timeline.during(begin - 1, end + 1) == (frozenset({"a", "b", "c"}), frozenset({503}))
    assert timeline.during(end + 1, end + 2) == (frozenset({"c"}), frozenset())
