"""Groups: which there are, in which order, and that none is made up."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
import torch
from torch.nn import functional

import dualform
from dualform.attend.memory import Memory
from dualform.attend.sql import database
from dualform.errors import SelectionError
from helpers.paired import Pair
from helpers.small import batch, network, sgd


def annotated(path: Path, *steps: dict[str, Any]) -> Memory:
    """Record a step of four rows with each of these annotations, every one in its own shard."""
    model = network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path, shard_bytes=0) as recorder:
        for step, found in enumerate(steps):
            if found:
                recorder.annotate(**found)
            inputs, labels = batch(step, rows=4)
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    return dualform.open(path)


def totals(memory: Memory, by: Any) -> Any:
    return memory.attend(queries={"0": batch(500)[0]})["0"].totals(by=by)


def sizes(memory: Memory, by: Any) -> dict[Any, int]:
    """Return how many patterns each group has, in the order of the groups."""
    grouping = memory._table.group("0", by)
    return dict(zip(grouping.labels, np.bincount(grouping.codes, minlength=len(grouping.labels)).tolist(), strict=True))


def test_a_missing_value_is_a_group_of_its_own_and_the_last(run: Path) -> None:
    memory = annotated(run, {}, {"a": ["z", "a", "a", "b"]}, {"b": 1}, {"a": "c"})
    assert list(sizes(memory, "a").items()) == [("a", 2), ("b", 1), ("c", 4), ("z", 1), (None, 8)]
    assert list(sizes(memory, "b").items()) == [(1, 4), (None, 12)]
    assert list(sizes(memory, ["b", "a"])) == [
        (1, None),
        (None, "a"),
        (None, "b"),
        (None, "c"),
        (None, "z"),
        (None, None),
    ]


def test_groups_are_ordered_by_value_whatever_the_order_of_shards(run: Path) -> None:
    memory = annotated(run, {"a": [9, 1, 9, 1]}, {"a": [-5, 100, 1, 9]})
    assert list(sizes(memory, "a").items()) == [(-5, 1), (1, 3), (9, 3), (100, 1)]
    assert list(sizes(memory.without(a=1), "a")) == [-5, 9, 100], "only groups that the view has"
    assert list(sizes(memory.at(step=1), "a")) == [1, 9]


def test_not_a_number_is_one_group_after_the_numbers(run: Path) -> None:
    nan = math.nan
    memory = annotated(run, {"a": [nan, 1.0, nan, 0.5]}, {"a": [nan, 2.0, 1.0, nan]}, {})
    found = sizes(memory, "a")
    assert list(found.values()) == [1, 2, 1, 4, 4]
    assert [str(label) for label in found] == ["0.5", "1.0", "2.0", "nan", "None"]
    assert totals(memory, "a").values.shape == (6, 5)


def test_booleans_strings_and_floats_keep_their_kind(run: Path) -> None:
    memory = annotated(run, {"b": [True, False, True, True], "s": ["1", "10", "9", ""], "f": [0.1, 0.2, 0.1, -0.0]})
    assert list(sizes(memory, "b").items()) == [(False, 1), (True, 3)]
    assert list(sizes(memory, "s")) == ["", "1", "10", "9"]
    assert list(sizes(memory, "f").items()) == [(-0.0, 1), (0.1, 2), (0.2, 1)]
    assert len(sizes(memory, ["b", "s", "f"])) == 4


def test_bins_are_named_by_their_lower_edge(run: Path) -> None:
    memory = annotated(run, {"f": [-0.1, 0.0, 0.4, 1.0], "i": [-3, 0, 4, 5]}, {})
    assert list(sizes(memory, dualform.bins("f", width=0.5)).items()) == [(-0.5, 1), (0.0, 2), (1.0, 1), (None, 4)]
    assert list(sizes(memory, dualform.bins("i", width=5)).items()) == [(-5, 1), (0, 2), (5, 1), (None, 4)]
    assert [type(label) for label in sizes(memory, dualform.bins("i", width=5))][:3] == [int, int, int]
    assert list(sizes(memory, dualform.bins("i", width=2.5))) == [-5.0, 0.0, 2.5, 5.0, None]
    found = totals(memory, dualform.bins("i", width=5))
    assert found.by == ("i:5",)


def test_an_address_is_a_column_like_any_other(pair: Pair) -> None:
    memory = pair.memory
    for name in ("step", "micro", "call", "row", "position", "pattern"):
        table = memory.patterns("0")
        expected = pc.value_counts(table[name].combine_chunks())
        counts = {entry["values"].as_py(): entry["counts"].as_py() for entry in expected}
        assert sizes(memory, name) == dict(sorted(counts.items()))


def test_one_column_in_a_list_is_labelled_as_that_column(pair: Pair) -> None:
    alone, listed = totals(pair.memory, "label"), totals(pair.memory, ["label"])
    assert alone.groups == listed.groups == (0, 1, 2, None)
    torch.testing.assert_close(alone.values, listed.values, rtol=0, atol=0)


def test_only_combinations_that_occur_are_groups_even_of_fine_columns(run: Path) -> None:
    """The product of the columns' values would not fit in memory; the groups are as many as the patterns."""
    rows, steps = 2000, 3
    model = network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        for step in range(steps):
            inputs, labels = batch(step, rows=rows)
            recorder.annotate(a=np.arange(rows) + step * rows, b=[f"{step}-{i}" for i in range(rows)])
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    found = sizes(dualform.open(run), ["a", "b", "pattern"])  # 6000³ combinations
    assert len(found) == rows * steps
    assert next(iter(found)) == (0, "0-0", 0)


def test_a_condition_reads_like_what_was_asked(pair: Pair) -> None:
    view = pair.memory.where("step > 2", label=(1, 2)).without(task=None)
    assert view.info().view == "(step > 2) and label = (1, 2); not task = None"


def test_null_and_not_null_are_told_apart_by_keywords_and_sql(run: Path) -> None:
    memory = annotated(run, {"a": 1}, {}, {"a": 2})
    assert memory.where(a=None).patterns("0")["step"].to_pylist() == [1] * 4
    assert memory.without(a=None).patterns("0")["step"].to_pylist() == [0] * 4 + [2] * 4
    assert memory.where("a is null").patterns("0")["step"].to_pylist() == [1] * 4
    # SQL's own logic: a condition that is null keeps nothing, and `without` is its complement.
    assert memory.where("a = 1").patterns("0").num_rows == 4
    assert memory.where("a <> 1").patterns("0").num_rows == 4
    assert memory.without("a = 1").patterns("0").num_rows == 8


def test_the_database_that_evaluates_sql_cannot_be_opened_up() -> None:
    duckdb = pytest.importorskip("duckdb")
    with database().cursor() as connection:
        for statement in ("set enable_external_access = true", "set lock_configuration = false"):
            with pytest.raises(duckdb.Error, match="configuration has been locked"):
                connection.execute(statement)


@pytest.mark.parametrize("comment", ["-- why", "/* why */"])
def test_sql_may_have_comments(run: Path, comment: str) -> None:
    memory = annotated(run, {"a": [1, 2, 3, 4]})
    assert memory.where(f"a > 2 {comment}").patterns("0")["a"].to_pylist() == [3, 4]


def test_a_number_that_no_column_holds_is_named(pair: Pair) -> None:
    with pytest.raises(dualform.DualformError, match=r"holds int64, which cannot equal 9223372036854775808"):
        pair.memory.where(sample=2**63).weights()


def test_a_value_that_cannot_be_encoded_is_refused_by_name(run: Path) -> None:
    memory = annotated(run, {"task": ["a", "b", "a", "b"]})
    with pytest.raises(SelectionError, match="cannot equal"):
        memory.where(task="\ud800").patterns("0")
