"""Data sets whose items say which sample they are, so that patterns can be annotated with the sample they come from."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from dualform.errors import AnnotationError


class IndexedDataset(Dataset[tuple[Any, Any]]):
    """A data set of (item, id), made by `indexed` from a data set of items."""

    def __init__(self, dataset: Any, column: str | None) -> None:
        self.dataset = dataset
        self.column = column

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        item = self.dataset[index]
        return item, self._id(index, item)

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, Any]]:
        """Return several samples, read at once where the data set can do that."""
        if not hasattr(self.dataset, "__getitems__"):
            return [self[index] for index in indices]
        items = self.dataset.__getitems__(list(indices))
        return [(item, self._id(index, item)) for index, item in zip(indices, items, strict=True)]

    def _id(self, index: int, item: Any) -> Any:
        if self.column is None:
            return index if index >= 0 else len(self) + index
        if not isinstance(item, Mapping) or self.column not in item:
            has = f"a mapping with {', '.join(map(repr, item))}" if isinstance(item, Mapping) else type(item).__name__
            raise AnnotationError(
                f"Sample {index} has no column {self.column!r}: it is {has}. Leave out column=... to number the "
                "samples by their places in the data set."
            )
        return item[self.column]


def indexed(dataset: Any, *, column: str | None = None) -> IndexedDataset:
    """Return a data set of (item, id) for a map-style data set of items, to annotate patterns with the ids.

        loader = DataLoader(dualform.indexed(dataset), batch_size=32, shuffle=True)
        for (images, labels), ids in loader:
            recorder.annotate(sample=ids, label=labels)

    >>> dualform_dataset = indexed(["a", "b", "c"])
    >>> len(dualform_dataset), dualform_dataset[1]
    (3, ('b', 1))

    Args:
        dataset: has a length and items by whole numbers, as torch's `Dataset` and the data sets of Hugging Face have.
        column: the key of the items, which are mappings then, that holds their ids; by default an id is the item's
            place in the data set.
    """
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise AnnotationError(
            f"A {type(dataset).__name__} has no numbered items; expected a data set with a length and items by number. "
            "Let your stream yield an id with each item instead, and annotate with that."
        )
    return IndexedDataset(dataset, column)
