"""Columns that travel beside the model's inputs, from a data set through a collator."""

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset, default_collate

from dualform.errors import AnnotationError
from dualform.integrations.carried_columns import CARRIED, CarryingCollator, CarryingDataset, CarryingStream

ITEMS = [{"input_ids": [1] * length, "source": "ab"[length % 2]} for length in (3, 1, 2)]


def lengths(items: list[dict[str, Any]]) -> dict[str, Any]:
    assert all(CARRIED not in item for item in items)
    return {"lengths": [len(item["input_ids"]) for item in items]}


def test_columns_arrive_with_their_batch() -> None:
    data = CarryingDataset(ITEMS, ["source"])
    loader = DataLoader(data, batch_size=2, collate_fn=CarryingCollator(lengths))
    batches = list(loader)
    assert [batch["lengths"] for batch in batches] == [[3, 1], [2]]
    assert [dict(batch[CARRIED].columns) for batch in batches] == [
        {"sample": [0, 1], "source": ["b", "b"]},
        {"sample": [2], "source": ["a"]},
    ]
    assert [batch[CARRIED].lengths for batch in batches] == [(3, 1), (2,)]
    assert all(CARRIED not in item for item in ITEMS), "the data set's own items are left alone"


def test_a_stream_carries_columns_without_places() -> None:
    class Stream(IterableDataset[Any]):
        epoch = 0

        def __iter__(self) -> Iterator[Any]:
            return iter(ITEMS)

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    inner = Stream()
    stream = CarryingStream(inner, ["source"])
    stream.set_epoch(3)
    assert inner.epoch == 3
    assert [item[CARRIED] for item in stream] == [{"source": "b"}, {"source": "b"}, {"source": "a"}]


def test_batches_without_columns_are_left_alone() -> None:
    assert CarryingCollator(default_collate)([{"x": 1.0}])["x"].tolist() == [1.0]
    assert CarryingCollator(len)([]) == 0


def test_workers_get_copies() -> None:
    data, collator = pickle.loads(pickle.dumps((CarryingDataset(ITEMS, ["source"]), CarryingCollator(lengths))))
    assert collator([data[2]])[CARRIED].columns == {"sample": [2], "source": ["a"]}
    assert pickle.loads(pickle.dumps(CarryingStream(ITEMS, []))).columns == ()


def test_a_collator_may_be_asked_for_what_it_wraps() -> None:
    class Collator:
        tokenizer = "a tokenizer"

        def __call__(self, items: list[Any]) -> Any:
            return items

    collator = CarryingCollator(Collator())
    assert collator.tokenizer == "a tokenizer"
    with pytest.raises(AnnotationError, match="returned a list; expected a dictionary"):
        collator([CarryingDataset(ITEMS, [])[0]])


def test_items_that_are_no_dictionaries_are_refused() -> None:
    with pytest.raises(AnnotationError, match="of type tuple; expected a dictionary"):
        CarryingDataset([(1.0, 2)], [])[0]
