"""Groups are numbered as they come, and are those that the pattern table has."""

import math

import pytest

from dualform.binning import Bins
from dualform.errors import RefusedError
from dualform.recording.annotations import bind
from dualform.recording.group_labels import REST, GroupLabels, TooManyGroupsError
from dualform.recording.sinks import StepCall


def call(rows: int = 3, positions: int = 1, inner: int = 1, **columns: object) -> StepCall:
    return StepCall(0, 0, 0, rows, positions, inner, bind(columns) if columns else None)


def labels(*columns: str | Bins, most: int = 8, rest: bool = False) -> GroupLabels:
    return GroupLabels(columns, most=most, rest=rest)


def test_values_are_numbered_as_they_come() -> None:
    found = labels("label")
    assert found.codes(0, call(label=[7, 3, 7]), batch_last=False).tolist() == [1, 0, 1]
    assert found.codes(1, call(label=[9, 3, 3]), batch_last=False).tolist() == [2, 0, 0]
    assert found.labels == [3, 7, 9]


def test_a_missing_value_is_a_group() -> None:
    found = labels("label")
    assert found.codes(0, call(), batch_last=False).tolist() == [0, 0, 0]
    assert found.codes(0, call(other=1), batch_last=False).tolist() == [0, 0, 0]
    assert found.labels == [None]


def test_an_empty_batch_has_no_groups() -> None:
    found = labels("label", "step")
    assert found.codes(0, call(0, label=[]), batch_last=False).tolist() == []
    assert found.codes(0, call(0), batch_last=False).tolist() == []
    assert found.labels == []


def test_constants_rows_and_positions() -> None:
    found = labels("source", "label")
    codes = found.codes(0, call(2, 3, 3, source="a", label=[[1, 2, 1], [2, 2, 1]]), batch_last=False)
    assert found.labels == [("a", 1), ("a", 2)]
    assert codes.tolist() == [0, 1, 0, 1, 1, 0]
    turned = found.codes(0, call(2, 3, 1, source="a", label=[[1, 2, 1], [2, 2, 1]]), batch_last=False)
    assert turned.tolist() == [0, 1, 1, 1, 0, 0]  # (L, B): position by position


def test_steps_and_numbers_are_cut_into_bins() -> None:
    found = labels(Bins("step", 10), Bins("loss", 0.5))
    assert found.codes(23, call(loss=[0.1, 0.7, math.nan]), batch_last=False).tolist() == [0, 1, 2]
    assert found.labels[:2] == [(20, 0.0), (20, 0.5)]
    assert found.names == ("step:10", "loss:0.5")
    with pytest.raises(RefusedError, match="only numbers"):
        labels(Bins("name", 2)).codes(0, call(name=["a", "b", "c"]), batch_last=False)


def test_groups_beyond_the_last_are_refused_or_the_rest() -> None:
    with pytest.raises(TooManyGroupsError, match="one group more than the 2"):
        labels("label", most=2).codes(0, call(label=[1, 2, 3]), batch_last=False)
    found = labels("label", most=2, rest=True)
    assert found.codes(0, call(label=[1, 2, 3]), batch_last=False).tolist() == [0, 1, 2]
    assert found.codes(0, call(label=[4, 2, 1]), batch_last=False).tolist() == [2, 1, 0]
    assert found.labels == [1, 2, REST]
    again = labels("label", most=2, rest=True)
    again.load(found.labels)
    assert again.codes(0, call(label=[5, 2, 6]), batch_last=False).tolist() == [2, 1, 2]
    assert again.labels == [1, 2, REST]


@pytest.mark.parametrize("columns", [("site",), ("site", "micro")])
def test_a_users_own_rest_is_not_the_group_of_all_others(columns: tuple[str, ...]) -> None:
    found = labels(*columns, most=2, rest=True)
    rows = call(site=["rest", "a", "z"])
    assert found.codes(0, rows, batch_last=False).tolist() == [1, 0, 2]
    assert len(set(found.labels)) == 3
    again = labels(*columns, most=2, rest=True)
    again.load(found.labels)
    assert again.codes(0, rows, batch_last=False).tolist() == [1, 0, 2]
    assert again.labels == found.labels


def test_one_and_true_are_two_groups_and_a_whole_number_is_its_float() -> None:
    found = labels("label")
    found.codes(0, call(label=[1, 1, 2]), batch_last=False)
    assert found.codes(0, call(label=[1.0, 2.0, math.nan]), batch_last=False).tolist() == [0, 1, 2]
    assert found.codes(0, call(label=[True, True, True]), batch_last=False).tolist() == [3, 3, 3]
    again = labels("label")
    again.load(found.labels)
    assert again.codes(0, call(label=[math.nan, 2.0, 1.0]), batch_last=False).tolist() == [2, 1, 0]
