"""SQL conditions: what they may say, and what they may take."""

import sys
import threading

import numpy as np
import pyarrow as pa
import pytest

from dualform.attend.sql import FUNCTIONS, database, named_columns, sql_mask
from dualform.errors import SelectionError

NAMES = ("pattern", "step", "label", "task", "x")
TABLE = pa.table({
    "pattern": np.arange(6), "step": [0, 0, 1, 1, 2, 2], "label": [3, None, 5, 3, 4, 5],
    "task": ["a", "b", "a", None, "B", "a"], "x": [0.5, -1.0, 2.0, float("nan"), 0.0, 1.0],
})  # fmt: skip


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("label = 3", [0, 3]),
        ("label = 3 or step > 1 -- both", [0, 3, 4, 5]),
        ("label in (3, 4) and not (task = 'a')", [4]),
        ("LABEL between 4 and 5", [2, 4, 5]),
        ('"label" is null', [1]),
        ("lower(task) = 'b'", [1, 4]),
        ("task like '%B%'", [4]),
        ("coalesce(label, 0) = 0", [1]),
        ("case when step = 1 then label = 5 else false end", [2]),
        ("label::varchar = '3' and try_cast(x as int) is not null", [0]),
        ("abs(x) >= 1 and not isnan(x)", [1, 2, 5]),
        ("list_contains([3, 4], label)", [0, 3, 4]),
        ("nullif(step, 1) is null", [2, 3]),
        ("hash(pattern) % 2 >= 0", [0, 1, 2, 3, 4, 5]),
    ],
)
def test_conditions_about_a_pattern(sql: str, expected: list[int]) -> None:
    assert np.flatnonzero(sql_mask(TABLE, sql, NAMES)).tolist() == expected


@pytest.mark.parametrize(
    ("sql", "reason"),
    [
        ("random() < 0.5", r"random\(\) may not be used"),
        ("label = 3 and uuid() is not null", r"uuid\(\) may not"),
        ("list_filter([1], lambda y: y > 0.5) is null", "may not be used|may hold no lambda"),
        ("length(repeat('x', 4000000000)) > step", r"repeat\(\) may not"),
        ("replace(task, 'a', 'aaaa') = 'b'", r"replace\(\) may not"),
        ("now() > '2020-01-01'", r"now\(\) may not"),
        ("current_date > '2020-01-01'", "no column 'current_date'"),
        ("current_setting('threads') = '1'", "may not be used"),
        ("nextval('x') = 1", "may not be used"),
        ("sleep_ms(1) is null", "may not be used"),
        ("sum(label) > 3", "may not be used"),
        ("count(*) over () > 3", "may hold no window"),
        ("(select 1) = 1", "may hold no subquery"),
        ("label in (select 3)", "may hold no subquery"),
        ("columns(*) = 1", "may hold no star"),
        ("label = $1", "may hold no parameter"),
        ("#2 = 1", "have names here, and no numbers"),
        ("1=1) or (1=1", "syntax error"),
        ("1=1; select 2", "one expression"),
        ("1=1, 2", "one expression"),
        ("1=1 from range(10)", "one expression"),
        ("1=1 where true", "one expression"),
        ("1=1 order by 1", "one expression"),
        ("1=1 union select 2", "one expression"),
        ("label = 3 limit 1", "one expression"),
        ("distinct label = 3", "one expression"),
        ("", "cannot be evaluated"),
        ("nothing = 3", "no column 'nothing'"),
    ],
)
def test_conditions_about_anything_else_are_refused(sql: str, reason: str) -> None:
    with pytest.raises(SelectionError, match=reason):
        sql_mask(TABLE, sql, NAMES)


def test_a_text_that_cannot_be_encoded_is_refused_by_name() -> None:
    with pytest.raises(SelectionError, match="surrogate"):
        sql_mask(TABLE, "task = '\ud800'", NAMES)


def test_a_condition_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[sql_mask.__module__], "MAX_SECONDS", 0.05)
    rows = pa.table({"pattern": np.arange(2_000_000)})
    slow = " and ".join(f"regexp_matches(pattern::varchar, '(1|2|3)+.*{i}x')  = false" for i in range(10))
    with pytest.raises(SelectionError, match="takes longer than"):
        sql_mask(rows, slow, ("pattern",))


def test_what_may_be_called_depends_on_its_arguments_alone() -> None:
    query = "select function_name, function_type, stability from duckdb_functions()"
    found: dict[str, set[tuple[str, str | None]]] = {}
    with database().cursor() as connection:
        for name, kind, stability in connection.execute(query).fetchall():
            if kind in ("scalar", "aggregate", "macro", "window"):
                found.setdefault(name, set()).add((kind, stability))
    syntax = {"not", "ifnull", "position"}  # which the parser turns into others
    for name in FUNCTIONS - syntax:
        assert found.get(name, set()) <= {("scalar", "CONSISTENT"), ("macro", None)}, name
        assert name in found, name


def test_a_condition_is_looked_at_once() -> None:
    named_columns.cache_clear()
    for _ in range(3):
        sql_mask(TABLE, "label = 3", NAMES)
    assert named_columns.cache_info().misses == 1


def test_nothing_holds_a_connection_when_a_condition_was_evaluated() -> None:
    before = threading.active_count()
    for _ in range(20):
        sql_mask(TABLE, "label = 3", NAMES)
        assert threading.active_count() == before
