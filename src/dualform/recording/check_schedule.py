"""Which steps are checked in full: all of them, or the first ones, a random one in sixteen, and whatever is unusual.

A full check reads every gradient and compares it with the sum of its patterns. Between full checks a gradient is seen
through a sample of its elements. `verify` proves a whole run afterwards; the checks are there to refuse early.
"""

from collections.abc import Hashable
from typing import Literal

import xxhash

Check = Literal["sampled", "every"]
CheckOrNone = Check | Literal["never"]
"""Which steps are checked in full; none in a replay, where every step is proved to be one that was checked before."""
FIRST_STEPS = 20
"""Steps that are checked in full at the beginning of a recording, and after anything unusual."""
ONE_IN = 16
"""Of this many later steps one is checked in full, on average."""


class CheckSchedule:
    """Decides for each step of a recording whether it is checked in full.

    Attributes:
        next_is_full: whether the step that is being accumulated will be checked in full, as far as it is known before.
    """

    def __init__(self, check: CheckOrNone, seed: int) -> None:
        """Decide for one recording.

        Args:
            check: "every" step, "sampled" ones, or none ("never").
            seed: of the random choice; the same seed chooses the same steps.
        """
        self._check = check
        self._seed = seed
        self._left = FIRST_STEPS  # steps to come that are checked in full in any case
        self._known: set[Hashable] = set()
        self._counted = -1  # the last step that was asked for
        self.next_is_full = check != "never"

    def is_full(self, step: int, kind: Hashable) -> bool:
        """Say whether a step is checked in full, and find `next_is_full`.

        Args:
            step: its number. Several optimizers may ask for one step.
            kind: what is the same for all ordinary steps of a training; a kind not seen before is unusual.
        """
        if kind not in self._known:
            self._known.add(kind)
            self._left = FIRST_STEPS
        full = self._is_chosen(step)
        if step != self._counted:
            self._counted, self._left = step, max(0, self._left - 1)
        self.next_is_full = self._is_chosen(step + 1)
        return full

    def _is_chosen(self, step: int) -> bool:
        if self._check != "sampled":
            return self._check == "every"
        return self._left > 0 or xxhash.xxh3_64_intdigest(f"{self._seed} {step}".encode()) % ONE_IN == 0
