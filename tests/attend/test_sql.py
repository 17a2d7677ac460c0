"""SQL conditions: what they may say, and what they may take."""

import sys
import time

import numpy as np
import pyarrow as pa
import pytest

from dualform.attend.sql import check_condition, sql_mask
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
        ("len(list_filter([3, 4], lambda y: y = label)) = 1", [0, 3, 4]),
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
        ("list_filter([1], lambda y: random() > 0.5) is null", r"random\(\) may not"),
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


def test_a_condition_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[sql_mask.__module__]
    monkeypatch.setattr(module, "MAX_SECONDS", 0.2)
    rows = pa.table({"pattern": np.arange(200_000)})
    slow = " and ".join(f"len(list_filter(range(300), lambda y: (y * pattern + {i}) % 7 = 8)) = 0" for i in range(6))
    began = time.monotonic()
    with pytest.raises(SelectionError, match="takes longer than"):
        sql_mask(rows, slow, ("pattern",))
    assert time.monotonic() - began < 10


def test_a_condition_that_takes_too_much_memory_is_ended() -> None:
    with pytest.raises(SelectionError, match=r"memory|cannot be evaluated"):
        sql_mask(TABLE, "length(repeat('x', 4000000000)) > step", NAMES)


def test_a_condition_is_looked_at_once() -> None:
    check_condition.cache_clear()
    for _ in range(3):
        sql_mask(TABLE, "label = 3", NAMES)
    assert check_condition.cache_info().misses == 1
