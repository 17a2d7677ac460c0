"""One question as data: which patterns, measured by what, grouped how, added up by which reducer.

A `Pass` may see its patterns in any order and in any cut, because its reducer can merge; a `Fold` goes through the
steps in their order, and a `Sweep` in reverse. Jobs that are given to an executor together share their reading.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualform.engine.measures import Measure
from dualform.engine.parameter_steps import Follower, Following, GroupsByPart, Onlooker
from dualform.engine.reading import PatternRange, count_kept
from dualform.engine.reducers import Reducer
from dualform.engine.source import PatternPart, PatternSource
from dualform.identity.families.optimizer_facts import CoefficientsOf

R = TypeVar("R")


class View(Protocol):
    """Which patterns of a source a question is about: those of the first steps that a mask keeps."""

    @property
    def horizon(self) -> int:
        """Patterns of steps from here on are left out, and coefficients are those after this many steps."""

    @property
    def key(self) -> Hashable:
        """Names the view: two views of one source with equal keys keep the same patterns."""

    def mask(self, part: PatternPart, layer: str) -> npt.NDArray[np.bool_] | None:
        """Return which patterns of a part and layer are kept, (n,); None for all of them."""

    def count(self, layer: str) -> int:
        """Return how many patterns of a layer are kept."""

    def patterns(self, layer: str) -> npt.NDArray[np.int64]:
        """Return the number of each kept pattern of a layer, counted from the start of the run."""


@dataclass(frozen=True, slots=True, eq=False)
class WholeView:
    """All patterns of the first `horizon` steps of a source."""

    source: PatternSource
    horizon: int

    @property
    def key(self) -> Hashable:
        """Names the view."""
        return ("whole", self.horizon)

    def mask(self, part: PatternPart, layer: str) -> None:
        """Keep every pattern."""

    def count(self, layer: str) -> int:
        """Return how many patterns of a layer there are."""
        return count_kept(self.source, layer, horizon=self.horizon)

    def patterns(self, layer: str) -> npt.NDArray[np.int64]:
        """Return the number of each pattern of a layer."""
        return np.arange(self.count(layer))


class Groups(Protocol):
    """The group of each kept pattern of one layer in one view."""

    @property
    def known_by_part(self) -> bool:
        """Whether groups are found part by part, so that a range may not go across parts."""

    def of(self, wanted: PatternRange, device: torch.device) -> Tensor:
        """Return the groups of a range's patterns, (n,)."""


@dataclass(frozen=True, slots=True, eq=False)
class Pass(Generic[R]):
    """One question over the kept patterns of a layer, in any order.

    Attributes:
        layer: the layer's name.
        view: which patterns.
        reducer: adds the measures up.
        like: says where and in which dtype to compute.
        queries: (Q, d_in), for a measure.
        measure: gives each pattern a measure per query; None where the reducer looks at keys and values alone.
        rows: how many rows of measures there are; by default one per query.
        groups: each pattern's group; None for one group.
        values: whether the reducer looks at keys, values or coefficients beside the measures.
        coefficients_of: whether coefficients are those of the parameter or of its momentum buffer.
        block_patterns: how many patterns to measure at once; by default the executor's choice.
        again: whether more questions about the very same queries may follow, so that measures are worth remembering.
    """

    layer: str
    view: View
    reducer: Reducer[Any, R]
    like: Tensor
    queries: Tensor | None = None
    measure: Measure | None = None
    rows: int | None = None
    groups: Groups | None = None
    values: bool = False
    coefficients_of: CoefficientsOf = "parameter"
    block_patterns: int | None = None
    again: bool = True

    @property
    def needs_values(self) -> bool:
        """Whether values and coefficients have to be read."""
        return self.values or (self.measure is not None and self.measure.needs_values)

    @property
    def needs_whole_keys(self) -> bool:
        """Whether keys have to come multiplied with their scales; a measure of keys alone takes scales itself."""
        return self.measure is None or self.needs_values

    @property
    def dtype(self) -> torch.dtype | None:
        """What to compute in; None for the layer's own dtype."""
        return self.like.dtype if self.like.is_floating_point() else None

    def new_state(self) -> Any:
        """Return the reducer's state of no patterns."""
        rows = self.rows if self.rows is not None else 0 if self.queries is None else len(self.queries)
        return self.reducer.new(torch.empty(rows, 0, dtype=self.dtype, device=self.like.device))


@dataclass(frozen=True, slots=True, eq=False)
class Sweep(Pass[R]):
    """A pass over contributions of single patterns where the optimizer has no coefficients.

    What multiplies a step's gradients depends on all later steps, so that patterns are seen from the last step to the
    first (`sweep.py`). The measure is a contribution to one output unit per query.
    """


@dataclass(frozen=True, slots=True, eq=False)
class Fold(Generic[R]):
    """One question over the steps in their order: the optimizers' steps are taken again, and something follows them.

    For parameters whose optimizer has no coefficients this finds weights, shares, and the optimizer's state at a
    horizon; it works for every optimizer. The result is a dictionary: parameter -> what the follower found (R); or what
    an onlooker found, which sees all parameters together after each step.

    Attributes:
        parameters: the names of the parameters whose steps are taken again.
        horizon: how many steps.
        follower: what to find out along the steps of each parameter.
        groups: each pattern's group, for followers that tell groups apart; None if all are in group 0.
        onlooker: makes what looks at all parameters together, given their followings.
        from_settings: whether steps whose maps follow from settings alone (SGD's) are not taken again: the followings
            of such parameters are given `Following.add_step` in place of gradients, and the replay stays at the start.
    """

    parameters: tuple[str, ...]
    horizon: int
    follower: Follower[R]
    groups: GroupsByPart | None = None
    onlooker: Callable[[Mapping[str, Following[R]]], Onlooker] | None = None
    from_settings: bool = False


Job = Pass[Any] | Fold[Any]


class Executor(Protocol):
    """Runs jobs over a source."""

    def run(self, source: PatternSource, jobs: Sequence[Job]) -> list[Any]:
        """Return the result of each job; jobs of one call share their reading."""
