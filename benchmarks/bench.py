"""What a row works with: the device, sizes, and folders that go away. Stores and networks are in `stores.py`."""

import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.timing import Pairs, alternate

T = TypeVar("T")


@dataclass(slots=True)
class Bench:
    """One run of the suite.

    Attributes:
        folder: where stores are written: on the disk that is to be measured.
        device: what is measured.
        quick: tiny sizes, to see that every row works; the figures mean nothing then.
    """

    folder: Path
    device: torch.device
    quick: bool = False
    made: dict[object, object] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def size(self, full: int, quick: int) -> int:
        """Return a size."""
        return quick if self.quick else full

    def once(self, what: object, make: Callable[[], T]) -> T:
        """Make something that several rows use, the first time it is asked for."""
        if what not in self.made:
            self.made[what] = make()
        return self.made[what]  # type: ignore[return-value]

    def new_folder(self) -> Path:
        """Return a folder that does not exist yet."""
        return self.folder / f"{next(self._numbers):04}"

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Yield a folder that does not exist yet, and remove what was made of it."""
        folder = self.new_folder()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def alternate(
        self, ours: Callable[[], object], theirs: Callable[[], object], *, budget: float = 20.0, least: int = 3
    ) -> Pairs:
        """Run two things in turn on the device."""
        if self.quick:
            return alternate(ours, theirs, device=self.device, least=1, most=1, warm=0)
        return alternate(ours, theirs, device=self.device, budget=budget, least=least)
