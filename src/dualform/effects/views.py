"""What effects need of a view of a memory and of its groups, as protocols: `attend` has the classes."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from dualform.engine.jobs import Executor, Groups, Pass, View
from dualform.engine.source import PatternSource

R = TypeVar("R")


class EffectView(View, Protocol):
    """Patterns of a source that a mask keeps, and the executor that runs jobs over them."""

    @property
    def run(self) -> PatternSource:
        """The source of the patterns."""

    @property
    def executor(self) -> Executor:
        """The executor that runs this view's jobs."""

    @property
    def conditions(self) -> Sequence[Any]:
        """The conditions of the mask; their repr names the mask where an answer is cached."""

    def answer(self, job: Pass[R]) -> R:
        """Run one job over this view's source."""


class EffectGroups(Groups, Protocol):
    """The groups of all kept patterns of one layer."""

    @property
    def parts(self) -> Sequence[Any]:
        """The columns that the groups are made by."""

    @property
    def labels(self) -> Sequence[Any]:
        """The value of each group, (G,)."""

    @property
    def codes(self) -> npt.NDArray[np.int64]:
        """The group of each kept pattern, (n,), in the order of patterns."""
