"""Each distinct key once: an input layer sees the same keys epoch after epoch, and attention repeats with them.

Where a source knows which patterns share a key, the key is measured once, and the measure counts as often as patterns
have it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualform.engine.jobs import View
from dualform.engine.reading import PatternRange, kept_key_ids
from dualform.engine.source import PatternSource

WORTHWHILE_KEYS_PER_PATTERN = 0.75  # at most; with more distinct keys, measuring each pattern is as fast


@dataclass(frozen=True, slots=True, eq=False)
class DistinctKeys:
    """The distinct keys of the patterns of a layer that a view keeps.

    Attributes:
        ids: (U,) the keys' numbers among the layer's distinct keys, ascending.
        places: (T,) the place among them of each pattern's key.
    """

    ids: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]

    def counts(self, groups_of: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
        """Return how many patterns of each group have each key, (G, U), given each pattern's group (T,)."""
        flat = groups_of.numpy() * len(self.ids) + self.places
        found = np.bincount(flat, minlength=groups * len(self.ids))
        return torch.from_numpy(found).view(groups, len(self.ids)).to(dtype)


def find_distinct(source: PatternSource, layer: str, view: View) -> DistinctKeys | None:
    """Return the distinct keys of the patterns that a view keeps; None where they are unknown or hardly fewer."""
    ids = kept_key_ids(source, layer, horizon=view.horizon, mask=view.mask)
    if ids is None or not len(ids):
        return None
    used = np.bincount(ids) > 0
    found = np.flatnonzero(used)
    if len(found) > WORTHWHILE_KEYS_PER_PATTERN * len(ids):
        return None
    return DistinctKeys(found, (np.cumsum(used) - 1)[ids])


def distinct_ranges(
    source: PatternSource, layer: str, ids: npt.NDArray[np.int64], *, size: int
) -> Iterator[PatternRange]:
    """Yield the distinct keys with these numbers, ascending, in ranges of at most `size`, none of them across parts."""
    for part in source.parts():
        own = part.own_keys(layer)
        if own is None:
            continue
        base, keys = own
        first, last = np.searchsorted(ids, [base, base + len(keys)]).tolist()
        rows = ids[first:last] - base
        for start in range(0, len(rows), size):
            yield PatternRange(part, rows[start : start + size], first + start, base, distinct=True)
