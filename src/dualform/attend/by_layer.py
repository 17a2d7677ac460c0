"""Answers by layer: `answers["layers.2"]` is one layer's, and a loop goes over the layers' names."""

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from dualform.errors import UnknownLayerError

L = TypeVar("L")


class ByLayer(Generic[L]):
    """Something that has an answer for each of some layers."""

    __slots__ = ()
    layers: Mapping[str, L]

    def __getitem__(self, layer: str) -> L:
        try:
            return self.layers[layer]
        except KeyError:
            known = ", ".join(map(repr, self.layers))
            raise UnknownLayerError(f"There is no spotlight on layer {layer!r}. There are: {known}.") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)
