"""SQL conditions: which rows of a pattern table one holds for, in a database that reaches nothing else.

A condition is one expression about one pattern. Runs are read shard by shard, and `where` and `without` must add up to
the whole, so whatever depends on other rows, on chance, on the time or on the machine is refused: subqueries, windows,
aggregates, `random()`, `now()`. So is what can make much out of little (`repeat`, `replace`), which no memory limit of
the database stops. DuckDB's own parser says what a condition consists of.
"""

import atexit
import functools
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dualform.errors import SelectionError

MAX_MEMORY = "1GB"  # that a condition may take
MAX_SECONDS = 20.0  # that a condition may take for one shard


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


OPERATORS = _words("+ - * / // % ** ^ & | << >> || @ ~~ !~~ ~~* !~~* ~~~ not nullif if ifnull xor")
OF_NUMBERS = _words(
    "abs ceil ceiling floor round trunc sign mod pow power sqrt exp ln log log2 log10 least greatest gcd lcm even "
    "isnan isinf isfinite bit_count divide multiply add subtract hash"
)
OF_TEXTS = _words(
    "like_escape not_like_escape ilike_escape not_ilike_escape lower upper lcase ucase trim ltrim rtrim length len "
    "strlen substring substr left right reverse concat contains starts_with ends_with prefix suffix instr strpos "
    "position ascii ord regexp_matches regexp_full_match regexp_extract"
)
OF_LISTS = _words("list_value list_contains list_has array_contains array_has list_position array_position")
FUNCTIONS = OPERATORS | OF_NUMBERS | OF_TEXTS | OF_LISTS
"""What a condition may call: functions of their arguments alone, whose values are no longer than those together."""


def sql_mask(table: pa.Table, sql: str, names: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Return for each row of a table whether a condition holds, (n,).

    Args:
        table: the columns that the condition may need, and `pattern`, which numbers the rows.
        sql: the condition.
        names: every column there is.
    """
    try:
        import duckdb
    except ImportError as error:
        raise SelectionError(
            'SQL conditions need duckdb, which is not installed. Use columns (task="mnist") or install it.'
        ) from error
    folded = [name.casefold() for name in names]
    if len(set(folded)) < len(folded):
        same = [name for name in names if folded.count(name.casefold()) > 1]
        raise SelectionError(
            f"SQL cannot tell the columns {', '.join(map(repr, same))} apart, which differ only in case. "
            'Select by column instead (task="mnist").'
        )
    try:
        sql.encode()
    except UnicodeError as error:
        raise SelectionError(_cannot(sql, f"{error}.", names)) from error
    named_columns(sql, tuple(names))
    with database().cursor() as connection:
        try:
            relation = connection.from_arrow(table)
            with _interrupted_after(connection, MAX_SECONDS):
                selected = relation.filter(f"({sql}\n)").project("pattern").to_arrow_table()["pattern"]
        except duckdb.InterruptException as error:
            raise SelectionError(
                f"The condition {sql!r} takes longer than {MAX_SECONDS:.0f} seconds for one shard. Use a simpler one."
            ) from error
        except duckdb.OutOfMemoryException as error:
            raise SelectionError(f"The condition {sql!r} takes more than {MAX_MEMORY} of memory.") from error
        except duckdb.Error as error:
            raise SelectionError(_cannot(sql, str(error), names)) from error
    return np.isin(np.asarray(table["pattern"]), np.asarray(selected), assume_unique=True)


@functools.lru_cache(maxsize=256)
def named_columns(sql: str, names: tuple[str, ...]) -> frozenset[str]:
    """Return the columns that a condition names.

    Raise unless the text is one expression about one pattern that gives the same answer every time.

    Args:
        sql: the condition.
        names: every column there is.
    """
    with database().cursor() as connection:
        (found,) = connection.execute("select json_serialize_sql(?)", [f"SELECT\n{sql}\n"]).fetchone()
        parsed = json.loads(found)
        if parsed.get("error"):
            raise SelectionError(_cannot(sql, parsed.get("error_message") or "it cannot be parsed.", names))
        node = parsed["statements"][0]["node"]
        alone = len(parsed["statements"]) == 1 and node.get("type") == "SELECT_NODE"
        if not alone or len(node["select_list"]) != 1 or not _is_bare(node):
            raise SelectionError(_cannot(sql, "expected one expression, and nothing around it.", names))
        known = {name.casefold(): name for name in names}
        found = set()
        for part in _expressions(node["select_list"]):
            reason = _objection(part, set(known))
            if reason is not None:
                raise SelectionError(_cannot(sql, reason, names))
            if part["class"] == "COLUMN_REF":
                found.add(known[str(part["column_names"][0]).casefold()])
        return frozenset(found)


def _is_bare(node: dict[str, Any]) -> bool:
    """Say whether a parsed SELECT has a list of expressions and nothing else: no FROM, WHERE, GROUP, LIMIT."""
    empty: tuple[Any, ...] = (None, [], {}, "")
    grouped = node.get("group_expressions") or node.get("having") or node.get("qualify") or node.get("sample")
    more = node.get("modifiers") not in empty or (node.get("cte_map") or {}).get("map") not in empty
    return node["from_table"]["type"] == "EMPTY" and node.get("where_clause") is None and not grouped and not more


def _expressions(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every expression of a parsed condition."""
    if isinstance(value, dict):
        if "class" in value:
            yield value
        for part in value.values():
            yield from _expressions(part)
    elif isinstance(value, list):
        for part in value:
            yield from _expressions(part)


def _objection(expression: dict[str, Any], known: set[str]) -> str | None:
    """Say why an expression may not be part of a condition, if it may not."""
    kind = expression["class"]
    if kind in ("SUBQUERY", "WINDOW", "STAR", "PARAMETER", "LAMBDA"):
        return f"a condition is about one pattern at a time, and may hold no {kind.lower()}."
    if kind == "POSITIONAL_REFERENCE":  # of a table that holds only the columns that are named
        return "columns have names here, and no numbers."
    if kind == "COLUMN_REF":
        name = str(expression["column_names"][0])
        return None if name.casefold() in known else f"there is no column {name!r}."
    if kind == "FUNCTION":
        name = str(expression["function_name"])
        if name.casefold() not in FUNCTIONS:
            return f"{name}() may not be used here."
    return None


def _cannot(sql: str, reason: str, names: Sequence[str]) -> str:
    first = reason.strip().splitlines()[0]
    return f"The condition {sql!r} cannot be evaluated: {first} Columns: {', '.join(names)}."


@contextmanager
def _interrupted_after(connection: Any, seconds: float) -> Iterator[None]:
    """Interrupt a connection's query if it takes longer than this."""
    timer = threading.Timer(seconds, connection.interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # it refers to the connection


@functools.cache
def database() -> Any:
    """Return an empty database that reaches no file and whose settings no condition can change."""
    import duckdb

    settings = {
        "enable_external_access": "false",
        "autoload_known_extensions": "false",
        "autoinstall_known_extensions": "false",
        "memory_limit": MAX_MEMORY,
        "threads": "1",
        "lock_configuration": "true",
    }
    atexit.register(_close)
    return duckdb.connect(":memory:", config=settings)


def _close() -> None:
    """Close the database before Python ends, since DuckDB prints all of its objects that are there afterwards."""
    if database.cache_info().currsize:
        database().close()
        database.cache_clear()
