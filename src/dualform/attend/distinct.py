"""Each distinct key once: an input layer sees the same keys epoch after epoch, and attention repeats with them.

Where such keys are stored once, and patterns refer to them, they are scored once too.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualform.store.reader import Run
from dualform.store.stream import Keep, references_kept

WORTH = 0.75  # distinct keys per pattern at most


@dataclass(frozen=True, slots=True, eq=False)
class Distinct:
    """The distinct keys of some patterns of a layer.

    Attributes:
        numbers: (U,) the keys' numbers in the layer's pool, ascending.
        places: (T,) the place among them of each pattern's key.
    """

    numbers: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]

    def counts(self, codes: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
        """Return how many patterns of each group have each key, (G, U), given each pattern's group (T,)."""
        flat = codes.numpy() * len(self.numbers) + self.places
        found = np.bincount(flat, minlength=groups * len(self.numbers))
        return torch.from_numpy(found).view(groups, len(self.numbers)).to(dtype)


def find_distinct(run: Run, layer: str, *, horizon: int, keep: Keep) -> Distinct | None:
    """Return the distinct keys of the kept patterns, where the layer has a pool and they are fewer."""
    references = references_kept(run, layer, horizon=horizon, keep=keep)
    if references is None or not len(references):
        return None
    used = np.bincount(references) > 0
    numbers = np.flatnonzero(used)
    if len(numbers) > WORTH * len(references):
        return None
    return Distinct(numbers, (np.cumsum(used) - 1)[references])
