"""Columns that are made of memory are those that Arrow makes of the same entries, one after the other."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import dualform
from dualform.store import arrow_columns
from dualform.store.arrow_columns import column_of, column_of_array, inferred_column

ENTRIES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.bool_(), st.booleans()),
    (pa.string(), st.text(max_size=5)),
    (pa.list_(pa.float64()), st.lists(st.floats(allow_nan=False), max_size=3)),
    (pa.list_(pa.int64()), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3)),
]


@given(st.data())
def test_entries_with_and_without_values(data: st.DataObject) -> None:
    kind, entry = data.draw(st.sampled_from(ENTRIES))
    values = data.draw(st.lists(st.one_of(st.none(), entry), max_size=20))
    found = column_of(values, kind)
    found.validate(full=True)
    assert found.equals(pa.array(values, type=kind))


@given(st.data())
def test_types_that_are_found(data: st.DataObject) -> None:
    entry = data.draw(st.sampled_from([entry for _, entry in ENTRIES[1:]] + [st.integers(0, 9) | st.floats(0, 9)]))
    values = data.draw(st.lists(st.one_of(st.none(), entry), max_size=20))
    found = inferred_column(values)
    found.validate(full=True)
    assert found.equals(pa.array(values))


@pytest.mark.parametrize("values", [[True, False, True], [1, -2, 3], [0.5, 2.0, -1.0], ["ä", "", "bcd"]])
@pytest.mark.parametrize("missing", [None, [False, True, False], [True, True, True]])
@pytest.mark.parametrize("step", [1, 2, -1])
def test_arrays(values: list[Any], missing: list[bool] | None, step: int) -> None:
    array = np.repeat(np.array(values), abs(step))[::step]
    mask = None if missing is None else np.array(missing)
    found = column_of_array(array, mask)
    found.validate(full=True)
    assert found.equals(pa.array(array, mask=mask))


def test_more_text_than_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_columns, "MAX_TEXT_BYTES", 3)
    assert column_of(["abc", None, "d"], pa.string()).to_pylist() == ["abc", None, "d"]


def test_a_recording_does_without_what_imports_pandas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of `pyarrow.array` imports pandas, on the thread of the writer beside a training that waits."""
    model = nn.Linear(40, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("pyarrow.array was called")

    with monkeypatch.context() as patch:
        patch.setattr(pa, "array", refused)
        with dualform.record(
            model, optimizer, tmp_path / "run", keep=[dualform.Steps(), dualform.Patterns()]
        ) as recorder:
            for step in range(2):
                recorder.annotate(turn=step, name=["a", "b"], part=[0.5, 0.25], late=[True, False])
                optimizer.zero_grad()
                model(torch.randn(2, 40)).sum().backward()
                optimizer.step()
    assert dualform.open(tmp_path / "run").patterns("")["name"].to_pylist() == ["a", "b"] * 2
