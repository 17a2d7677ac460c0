"""The suite itself: the fast run leaves no subject out, and files are really synced where that is the subject."""

import os
from pathlib import Path

import pytest

# Files that only the whole run has: processes that are killed, chance, a browser, or trainings of some length.
WHOLLY_SLOW = {"test_browser.py", "test_kill.py", "test_machine.py", "test_path_trainings.py"}


def test_every_file_keeps_a_fast_test(request: pytest.FixtureRequest) -> None:
    fast: dict[str, bool] = {}
    for item in request.session.items:
        fast[item.path.name] = fast.get(item.path.name, False) or item.get_closest_marker("slow") is None
    assert {name for name, kept in fast.items() if not kept} <= WHOLLY_SLOW


def test_the_files_that_take_longest_come_first(request: pytest.FixtureRequest) -> None:
    conftest = request.config.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py")))
    assert conftest is not None
    names = [item.path.name for item in request.session.items]
    assert names == sorted(names, key=lambda name: name not in conftest.LONG)
    assert [name for name in conftest.LONG if not list(Path(__file__).parent.rglob(name))] == []


def test_the_fast_cases_of_a_table_are_a_diagonal(request: pytest.FixtureRequest) -> None:
    name = "test_a_table_of_cases"
    found = [item for item in request.session.items if item.nodeid.partition("[")[0].endswith(name)]
    fast = [item for item in found if item.get_closest_marker("slow") is None]
    assert {tuple(item.callspec.params.values()) for item in fast} <= {(0, 0), (1, 1), (2, 2)}  # type: ignore[attr-defined]
    assert len(fast) in (0, 3)  # none where this test runs alone


@pytest.mark.mostly_slow(fast=3)
@pytest.mark.parametrize("column", range(3))
@pytest.mark.parametrize("row", range(3))
def test_a_table_of_cases(row: int, column: int) -> None:
    assert row + column < 5


def test_files_are_not_synced_where_publishing_is_not_the_subject() -> None:
    os.fsync(-1)  # os.fsync itself raises, see test_format.py
