"""Columns of training samples that travel with a batch from the data set to the training step, beside its inputs.

A framework's collator and its filter of unused columns know only the model's inputs. So each item gets one more entry,
`CARRIED`, with the sample's columns; the collator takes these entries off before it makes a batch of the rest, and puts
the columns of all samples back into the batch under the same name.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from dualform.errors import AnnotationError

CARRIED = "dualform"
"""The entry of an item, and of a batch, that holds the columns."""
SAMPLE = "sample"
"""The column with the places of samples in their data set."""


@dataclass(frozen=True, slots=True)
class CarriedColumns:
    """The columns of a batch's samples.

    Attributes:
        columns: name -> one entry per sample.
        lengths: how many tokens (`input_ids`) each sample had before it was padded or joined with others; 0 for none.
    """

    columns: Mapping[str, list[Any]]
    lengths: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.lengths)


class CarryingDataset(Dataset[Any]):
    """A map-style data set whose items carry their place in it, and columns of their own."""

    def __init__(self, dataset: Any, columns: Sequence[str]) -> None:
        self.dataset = dataset
        self.columns = tuple(columns)
        self._beside = _columns_beside(dataset, self.columns)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self._carry(index, self.dataset[index])

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several items, read at once where the data set can do that."""
        if not hasattr(self.dataset, "__getitems__"):
            return [self[index] for index in indices]
        items = self.dataset.__getitems__(list(indices))
        return [self._carry(index, item) for index, item in zip(indices, items, strict=True)]

    def _carry(self, index: int, item: Any) -> Any:
        beside = {} if self._beside is None else self._beside[index]
        return carry(item, {SAMPLE: int(index), **find_columns(item, beside, self.columns)})


class CarryingStream(IterableDataset[Any]):
    """A stream of items that carry columns of their own; a stream's items have no place."""

    def __init__(self, dataset: Any, columns: Sequence[str]) -> None:
        self.dataset = dataset
        self.columns = tuple(columns)

    def __iter__(self) -> Iterator[Any]:
        for item in self.dataset:
            yield carry(item, find_columns(item, {}, self.columns))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":  # not there yet while the stream is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)  # a framework asks a stream for set_epoch, n_shards and the like


def carry(item: Any, columns: Mapping[str, Any]) -> Any:
    """Return a copy of an item that carries columns."""
    if not isinstance(item, MutableMapping):
        raise AnnotationError(
            f"An item of the training data is of type {type(item).__name__}; expected a dictionary of the model's "
            "inputs. Give annotate=..., a function from a batch to its columns, and let your items hold an id."
        )
    carrying = copy.copy(item)
    carrying[CARRIED] = dict(columns)
    return carrying


def find_columns(item: Any, beside: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return columns of an item by name, from the item itself or from what the data set holds beside it."""
    found = {}
    for name in names:
        if isinstance(item, Mapping) and name in item:
            value = item[name]
        elif name in beside:
            value = beside[name]
        else:
            there = sorted(map(str, {*(item if isinstance(item, Mapping) else ()), *beside}))
            raise AnnotationError(
                f"The training data has no column {name!r}; there are {', '.join(map(repr, there)) or 'none'}. Name "
                "columns=[...] of the data set."
            )
        found[name] = value.item() if getattr(value, "ndim", None) == 0 else value
    return found


def _columns_beside(dataset: Any, names: Sequence[str]) -> Any:
    """Return the plain columns of a data set of Hugging Face, whose format or transform may leave them out of items."""
    there = getattr(dataset, "column_names", None)
    if not names or not isinstance(there, list) or not hasattr(dataset, "select_columns"):
        return None
    return dataset.select_columns([name for name in names if name in there]).with_format(None)


class CarryingCollator:
    """A collator that makes batches of items as another one does, and hands on the columns that the items carry."""

    def __init__(self, collator: Callable[[list[Any]], Any]) -> None:
        self.collator = collator

    def __call__(self, items: list[Any]) -> Any:
        """Return a batch of items, with their columns where they carry any; items of an evaluation carry none."""
        if not items or not all(isinstance(item, MutableMapping) and CARRIED in item for item in items):
            return self.collator(items)
        carried = [item.pop(CARRIED) for item in items]
        lengths = tuple(_length(item) for item in items)
        batch = self.collator(items)
        if not isinstance(batch, MutableMapping):
            raise AnnotationError(
                f"The data collator returned a {type(batch).__name__}; expected a dictionary of the model's inputs, "
                "with which the samples' columns can travel."
            )
        names = list(carried[0])
        batch[CARRIED] = CarriedColumns({name: [columns[name] for columns in carried] for name in names}, lengths)
        return batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "collator":  # not there yet while the collator is unpickled
            raise AttributeError(name)
        return getattr(self.collator, name)


def _length(item: Any) -> int:
    tokens: Any = item.get("input_ids", ())
    return len(tokens) if hasattr(tokens, "__len__") else 0
