"""What a permuted batch shows of a layer: whether its patterns moved as the rows did, and on which axis. Pure."""

import dataclasses
import functools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from dualform.recording.rowcheck import Placement, RowCheck

FEW_ROWS = 3  # batches in which a permutation without fixed points may commute with what the model does to its rows
SAME = 0.05  # how far a row may be from where it should be, relative to how far the permutation moved it
ROUNDING = 64  # units in the last place of a tensor's largest element that rounding may move its elements by
FIRST_ROWS = 2  # of a batch, that are looked at before the others
MAX_CHUNK_ELEMENTS = 1 << 15  # that are compared at once on a CPU, so that they stay in its cache
MAX_SQUARED = 1e10  # the largest magnitude of rows that are compared in float32; its inverse is the smallest
MIN_ROW_ELEMENTS = 1 << 12  # of a row that is compared by itself; shorter ones are first brought together
FLAT = 50  # times the rounding: rows that differ by less count as equal

NO_ROW = "its patterns belong to no row of the batch"


@dataclass(frozen=True, eq=False)
class SeenCall:
    """The patterns of one call of a layer in a trial; keys have the shape (*leading, d_in)."""

    leading: tuple[int, ...]
    keys: Tensor  # (..., d_in)
    values: Tensor | None  # (n, d_out); nothing where the backward did not come

    @functools.cached_property
    def largest_key(self) -> float:
        """The largest magnitude of an element of the keys."""
        return _largest(self.keys)

    @functools.cached_property
    def largest_value(self) -> float:
        """The largest magnitude of an element of the values, if there are any."""
        return 0.0 if self.values is None else _largest(self.values)


def judge(before: SeenCall, after: SeenCall, order: Tensor) -> RowCheck:
    """Say whether one call's patterns moved as the rows of the batch did, and on which axis."""
    if before.leading != after.leading:
        return RowCheck("not aligned", "its input has another shape when rows move")
    places = _placements(before.leading, len(order))
    fitting = [place for place in places if _moves_as(before, after, place, order)]
    if len(fitting) == 1:
        return RowCheck("proved", f"rows are {fitting[0]}", fitting[0], shapes=frozenset([before.leading]))
    if fitting:
        return RowCheck("not aligned", f"rows could be {' or '.join(map(str, fitting))}")
    if not (_unchanged(before.keys, after.keys) and _unchanged(before.values, after.values)):
        return RowCheck("not aligned", "its rows are not those of the batch: sorted, rolled, joined or mixed")
    if any(_states(before, after, place, order) == {"equal"} for place in places):
        return RowCheck("assumed", "all its rows were equal", undecided=True)
    return RowCheck("not aligned", NO_ROW)


def joint_check(checks: Sequence[RowCheck]) -> RowCheck:
    """Return what holds for all calls of a layer in one forward; undecided where it is so for any of them."""
    decided = [check for check in checks if not check.undecided] or checks
    if len(set(decided)) == 1:
        shapes = frozenset[tuple[int, ...]]().union(*(check.shapes for check in decided))
        return dataclasses.replace(decided[0], shapes=shapes, undecided=any(check.undecided for check in checks))
    for outcome in ("not aligned", "assumed"):
        for check in checks:
            if check.outcome == outcome:
                return RowCheck(check.outcome, f"in one of {len(checks)} calls {check.reason}")
    return RowCheck("not aligned", "its calls have their rows in different places")


def _placements(leading: Sequence[int], rows: int) -> list[Placement]:
    """Return every place in which leading axes could hold so many rows."""
    found = []
    for axis, size in enumerate(leading):
        if size == rows:
            found.append(Placement(len(leading), axis))
        elif size > rows and size % rows == 0:
            found.append(Placement(len(leading), axis, "rows first"))
            found.append(Placement(len(leading), axis, "rows last"))
    return found


def _moves_as(before: SeenCall, after: SeenCall, place: Placement, order: Tensor) -> bool:
    """Say whether keys and values moved as the rows: one of them, and the other too unless all its rows are equal."""
    states = _states(before, after, place, order)
    return "moved" in states and states <= {"moved", "equal"}


def all_move_as(before: Sequence[SeenCall], after: Sequence[SeenCall], check: RowCheck, order: Tensor) -> bool:
    """Say whether all calls of a layer whose rows are proved moved as ordered; other calls than before did not."""
    if check.placement is None or [call.leading for call in before] != [call.leading for call in after]:
        return False
    if any(check.placement not in _placements(call.leading, len(order)) for call in before):
        return False
    return all(_moves_as(*pair, check.placement, order) for pair in zip(before, after, strict=True))


def _states(before: SeenCall, after: SeenCall, place: Placement, order: Tensor) -> set[str]:
    view = place.view(before.leading, len(order))
    assert view is not None, "placements are made for these leading axes"
    shape, axis = view
    if (before.values is None) != (after.values is None):
        return {"other"}

    def rows(patterns: Tensor) -> Tensor:  # (B, ...)
        return patterns.reshape(*shape, -1).movedim(axis, 0)

    states: set[str] = {_state(rows(before.keys), rows(after.keys), order, before.largest_key)}
    if before.values is not None and after.values is not None:
        states.add(_state(rows(before.values), rows(after.values), order, before.largest_value))
    return states


def _state(
    before: Tensor, after: Tensor, order: Tensor, largest: float | None = None
) -> Literal["moved", "equal", "other"]:
    """Say whether rows (B, ...) moved as ordered, are all equal, or did something else.

    Args:
        before: the rows before the permutation.
        after: the rows after it.
        order: which of the rows before each row after it should be, (B,).
        largest: the largest magnitude among the rows before, where it is known.
    """
    if not before.numel():
        return "equal"
    largest = _largest(before) if largest is None else largest
    rounding, dtype = _rounding(before, largest), _dtype_of_differences(before, largest)
    flat = FLAT * rounding
    order, rows = order.to(before.device), len(before)
    size = max(1, MAX_CHUNK_ELEMENTS // (before.numel() // rows)) if before.device.type == "cpu" else rows
    are_exact = _exact_comparison(before, after, order)
    apart, wrong, all_moved = 0.0, 0.0, True  # the greatest distance, the greatest error
    # The first rows are looked at alone: in most places where rows are not, they tell already.
    for start, stop in pairwise([0, *range(min(FIRST_ROWS, rows), rows, size), rows]):
        # Once rows are known to differ, a part whose rows are exactly where they should be tells nothing more. Where an
        # element is not finite, neither is `flat`, and every part is looked at.
        if apart > flat and are_exact(start, stop):
            continue
        expected, found = before.index_select(0, order[start:stop]), after[start:stop]
        error = _distances(found, expected, dtype)  # (b,)
        if not bool(torch.isfinite(error).all()):
            return "other"
        if apart > flat and bool((error <= rounding).all()):
            continue  # nor does one whose rows are there but for rounding
        distance = _distances(expected, before[start:stop], dtype)  # (b,)
        limit = torch.maximum(SAME * distance, torch.full_like(distance, rounding))
        all_moved = all_moved and bool((error <= limit).all())
        apart, wrong = _larger(apart, distance), _larger(wrong, error)
        if not all_moved and apart > flat:
            return "other"
    if apart <= flat:
        return "equal" if wrong <= flat else "other"
    return "moved" if all_moved else "other"


def _exact_comparison(before: Tensor, after: Tensor, order: Tensor) -> Callable[[int, int], bool]:
    """Return a function that says of the rows from one number to another whether each is to the bit as ordered."""
    if before.device.type == "cpu" and before.numel() >= len(before) * MIN_ROW_ELEMENTS:
        places, rows, found = order.tolist(), before.unbind(0), after.unbind(0)
        return lambda start, stop: all(torch.equal(found[row], rows[places[row]]) for row in range(start, stop))
    return lambda start, stop: torch.equal(after[start:stop], before.index_select(0, order[start:stop]))


def _distances(some: Tensor, others: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distances (b,) between rows (b, ...)."""
    found: Tensor = torch.linalg.vector_norm((some.to(dtype) - others.to(dtype)).flatten(1), dim=1)
    return found


def _dtype_of_differences(rows: Tensor, largest: float) -> torch.dtype:
    """Return the dtype in which rows are compared: float32 where squares of what tells them apart are normal in it.

    A comparison need not be finer than `_rounding`, which is a small multiple of the last place of the largest element.
    """
    few_bits = rows.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return torch.float32 if few_bits and 1 / MAX_SQUARED < largest < MAX_SQUARED else torch.float64


def _larger(one: float, others: Tensor) -> float:
    """Return the largest of these numbers; NaN where any of them is."""
    largest = float(others.max())
    return largest if largest > one or math.isnan(largest) else one


def _unchanged(before: Tensor | None, after: Tensor | None) -> bool:
    if before is None or after is None:
        return before is after
    if before.shape != after.shape:
        return False
    difference = float((after.double() - before.double()).norm())
    return difference <= 1e-3 * float(before.double().norm())


def _largest(rows: Tensor) -> float:
    """Return the largest magnitude of an element; NaN where any is."""
    if not rows.numel() or not rows.is_floating_point():
        return 0.0
    low, high = torch.aminmax(rows)
    return max(-float(low), float(high))


def _rounding(rows: Tensor, largest: float) -> float:
    """Return how far rounding may move a row of (B, ...), as a norm; nothing rounds whole numbers."""
    if not rows.is_floating_point():
        return 0.0
    return ROUNDING * torch.finfo(rows.dtype).eps * largest * math.sqrt(rows.numel() / len(rows))


def row_order(rows: int) -> Tensor:
    """Return a fixed permutation that is one cycle, so that no row stays, and no power of which is a roll or a flip.

    What a model does to its rows in a fixed way (a roll, a flip) must not commute with the permutation. With three
    rows and fewer that cannot be had.
    """
    generator = random.Random(2022)
    while True:
        cycle = list(range(rows))
        for i in range(rows - 1, 0, -1):  # Sattolo's shuffle gives one cycle
            j = generator.randrange(i)
            cycle[i], cycle[j] = cycle[j], cycle[i]
        if rows <= FEW_ROWS:
            return torch.tensor(cycle)
        power = cycle
        commutes = False
        for _ in range(min(rows, 12) - 2):
            commutes = commutes or _rolls_or_flips(power)
            power = [cycle[i] for i in power]
        if not commutes:
            return torch.tensor(cycle)


def _rolls_or_flips(order: Sequence[int]) -> bool:
    """Say whether an order is a roll, or the reverse."""
    rows, first = len(order), order[0]
    rolled = all(place == (first + i) % rows for i, place in enumerate(order))
    return rolled or list(order) == list(reversed(range(rows)))
