"""`dualform.indexed`: any map-style data set with the ids of its items."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import dualform
from dualform.errors import AnnotationError


def test_ids_are_places_and_survive_shuffling() -> None:
    inputs = torch.arange(10.0)[:, None]
    loader = DataLoader(dualform.indexed(TensorDataset(inputs, inputs[:, 0])), batch_size=4, shuffle=True)
    seen = []
    for (batch, labels), ids in loader:
        assert torch.equal(batch[:, 0], ids.float())
        assert torch.equal(labels, ids.float())
        seen += ids.tolist()
    assert sorted(seen) == list(range(10))


def test_items_are_read_at_once_where_the_data_set_can() -> None:
    class Batched:
        asked: list[list[int]] = []  # noqa: RUF012

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            raise AssertionError("items are read at once")

        def __getitems__(self, indices: Sequence[int]) -> list[int]:
            self.asked.append(list(indices))
            return [10 * index for index in indices]

    batches = list(DataLoader(dualform.indexed(Batched()), batch_size=2))
    assert [(items.tolist(), ids.tolist()) for items, ids in batches] == [([0, 10], [0, 1]), ([20, 30], [2, 3])]
    assert Batched.asked == [[0, 1], [2, 3]]


def test_ids_may_be_a_column() -> None:
    items: list[Any] = [{"x": 1.0, "key": "a7"}, {"x": 2.0, "key": "b1"}]
    data = dualform.indexed(items, column="key")
    assert [data[place][1] for place in range(2)] == ["a7", "b1"]
    with pytest.raises(AnnotationError, match="Sample 0 has no column 'id': it is a mapping with 'x', 'key'"):
        dualform.indexed(items, column="id")[0]
    with pytest.raises(AnnotationError, match="Sample 1 has no column 'id': it is float"):
        dualform.indexed([1.0, 2.0], column="id")[1]


def test_an_id_is_counted_from_the_beginning() -> None:
    assert dualform.indexed("abc")[-1] == ("c", 2)


def test_streams_are_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter([1, 2])

        def __getitem__(self, index: int) -> int:
            return index

        def __len__(self) -> int:
            return 2

    for stream in (Stream(), iter([1, 2])):
        with pytest.raises(AnnotationError, match="has no numbered items"):
            dualform.indexed(stream)
