"""How far rounding of their gradients may have carried the biases of a recording that keeps shares.

Where the true gradient of a bias is zero (that of an attention's keys), rounding is all that there is of it, and an
optimizer that divides a gradient by its own size makes as much of it as of any other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dualform.identity.families.divided_fold import SummedRows
from dualform.identity.families.optimizer_kind import DoubtfulStep, OptimizerKind, Spread
from dualform.identity.families.parameter_fold import UseRows, bias_roundings
from dualform.recording.agreement import JointWork
from dualform.recording.row_exchange import make_exchanges


@dataclass(frozen=True, slots=True)
class BiasPlace:
    """A bias whose shares are folded.

    Attributes:
        shape: of the rows that this process has.
        whole: of all rows; None where every process has them.
        dtype: what its shares are folded in.
        device: where.
    """

    shape: tuple[int, ...]
    whole: tuple[int, ...] | None
    dtype: torch.dtype
    device: torch.device


class BiasDoubts:
    """The spread of each bias on its way through the steps."""

    def __init__(self, biases: Mapping[str, BiasPlace]) -> None:
        self._biases = biases
        self._spreads: dict[str, Spread[Any]] = {}
        self._earlier: dict[str, Mapping[str, Tensor]] = {}  # of a resumed recording, until the next step
        self._doubtful: dict[str, tuple[Any, Mapping[str, Any]]] = {}  # of a step: bias -> its map, and its settings

    def note(self, name: str, kind: OptimizerKind[Any], linear: Any, settings: Mapping[str, Any]) -> None:
        """Take a parameter's step, as a map and with the optimizer's settings; `follow` comes when all are taken."""
        place = self._biases.get(name)
        if place is None:
            return
        if name not in self._spreads:
            made = kind.spread(place.shape)
            if made is None:
                return
            if (earlier := self._earlier.pop(name, None)) is not None:
                made.load({entry: earlier[entry].to(place.device) for entry in made.state})
            self._spreads[name] = made
        self._doubtful[name] = linear, settings

    def follow(self, rows: Mapping[str, Sequence[UseRows]], work: JointWork | None) -> None:
        """Follow a step, given its patterns by parameter, and the work with processes that have other rows."""
        doubtful, self._doubtful = self._doubtful, {}
        doubts = self._own_rows(self._roundings(list(doubtful), rows), work)
        steps = {name: DoubtfulStep(*of, doubts[name]) for name, of in doubtful.items()}
        families: dict[type[Spread[Any]], list[str]] = {}
        for name in steps:
            families.setdefault(type(self._spreads[name]), []).append(name)
        for family, names in families.items():
            family.step_together([self._spreads[name] for name in names], [steps[name] for name in names])

    def _roundings(self, names: Sequence[str], rows: Mapping[str, Sequence[UseRows]]) -> dict[str, Tensor]:
        """Return how far each element of the biases' gradients, with all rows, may be off by rounding."""
        places = {name: self._biases[name] for name in names}
        shapes = {name: place.shape if place.whole is None else place.whole for name, place in places.items()}
        found: dict[str, Tensor] = {}
        for dtype in {place.dtype for place in places.values()}:
            mine = [name for name in names if places[name].dtype == dtype]
            # Each grouping has all patterns.
            first = [[one for one in rows.get(name, ()) if one.use[0] == 0] for name in mine]
            sizes = bias_roundings(first, [shapes[name] for name in mine], dtype)
            for name, size in zip(mine, sizes, strict=True):
                shape, device = shapes[name], places[name].device
                found[name] = (
                    size.to(device) if isinstance(size, Tensor) else torch.zeros(shape, dtype=dtype, device=device)
                )
        return found

    def _own_rows(self, found: Mapping[str, Tensor], work: JointWork | None) -> dict[str, Tensor]:
        """Return sizes of biases; of divided ones this process's rows of the sum over processes."""
        mine = dict(found)
        if work is not None:
            sums = [
                SummedRows(
                    (1, *size.shape), size.dtype, work.world.size, partial(size.unsqueeze, 0), partial(_put, mine, name)
                )
                for name, size in sorted(found.items())
                if self._biases[name].whole is not None
            ]
            make_exchanges(work, sums)
        return mine

    def tensors(self, name: str) -> Mapping[str, Tensor]:
        """Return the spread of a bias as tensors: its size, and what it goes on from; nothing for other parameters."""
        if name in self._spreads:
            return {"size": self._spreads[name].size, **self._spreads[name].state}
        return self._earlier.get(name, {})

    def load(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Go on from the tensors that an earlier recording had of a bias."""
        self._earlier[name] = tensors


def _put(into: dict[str, Tensor], name: str, rows: Tensor) -> None:
    into[name] = rows[0]
