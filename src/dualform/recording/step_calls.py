"""The calls of a step: which accumulated calls reach it, where their patterns are in the batch, and their columns."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dualform.recording.annotations import Binding
from dualform.recording.hooks import Arrival
from dualform.recording.row_trials import UNCALLED
from dualform.recording.rowcheck import RowCheck
from dualform.recording.sinks import StepCall
from dualform.recording.step_in_progress import AccumulatedCall, Backward
from dualform.recording.watch import Watched


@dataclass(frozen=True, slots=True)
class UnfittingColumn:
    """A column that a layer's patterns could not take; `everywhere` if no layer of the step could."""

    binding: Binding
    layer: str
    name: str
    text: str
    everywhere: bool


@dataclass(slots=True)
class Gathered:
    """The calls of a step, and what is to be said of their annotations."""

    calls: list[StepCall] = field(default_factory=list)
    unfitting: list[UnfittingColumn] = field(default_factory=list)
    skipped: bool = False  # whether columns were left out because they were given for a batch without a backward
    checks: dict[str, RowCheck] = field(default_factory=dict)  # layer -> what a call showed of rows that no trial told


def gather_calls(
    backwards: Sequence[Backward],
    factors: Mapping[str, Sequence[float]],
    axis_of: Callable[[Watched], int],
) -> Gathered:
    """Return the calls whose gradient reaches the step through at least one parameter, with the columns that fit them.

    Args:
        backwards: the backwards of the step; index = micro.
        factors: updated parameter -> its gradient's factor in each micro.
        axis_of: the batch axis of a layer whose rows were not tried.
    """
    gathered = Gathered()
    fitted: dict[int, set[str]] = {}  # binding -> columns that some layer took, or that are known not to belong to it
    unfitting: list[tuple[Binding, str, str, str]] = []
    for micro, backward in enumerate(backwards):
        reached = {name for name, of in factors.items() if of[micro] != 0.0}
        layers: dict[str, _LayerCalls] = {}
        for accumulated in sorted(backward.calls, key=_forward_order):
            arrival = accumulated.arrival
            layer, binding = arrival.call.layer, arrival.call.binding
            mine = layers.get(layer.name)
            if mine is None:
                mine = layers[layer.name] = _LayerCalls(layer, reached, axis_of(layer))
            if not mine.reached:
                continue
            if binding is not None and not binding.belongs_to(arrival.call.forward):
                gathered.skipped, binding = True, None
            if binding is None or binding.is_plain:
                where = address(arrival.leading, mine.axis)
                of_step = accumulated.number, micro, mine.calls
                gathered.calls.append(StepCall(*of_step, *where, binding, arrival.layout, mine.finite))
                mine.calls += 1
                continue
            placed = _place(arrival, mine.axis, binding)
            taken = fitted.get(id(binding))
            if taken is None:
                taken = fitted[id(binding)] = set()
            if placed.settled or placed.binding is binding:
                taken.update(binding.columns)
            else:
                names = set() if placed.binding is None else set(placed.binding.columns)
                taken.update(names)
                for name in binding.columns.keys() - names:
                    text = binding.misfit(name, layer.name, placed.rows, placed.positions)
                    unfitting.append((binding, layer.name, name, text))
            if placed.check is not None:
                gathered.checks[layer.name] = placed.check
            gathered.calls.append(
                StepCall(
                    accumulated.number,
                    micro,
                    mine.calls,
                    placed.rows,
                    placed.positions,
                    placed.inner,
                    placed.binding,
                    arrival.layout,
                    mine.finite,
                )
            )
            mine.calls += 1
    gathered.unfitting = [
        UnfittingColumn(b, layer, name, text, name not in fitted[id(b)]) for b, layer, name, text in unfitting
    ]
    return gathered


def _forward_order(accumulated: AccumulatedCall) -> int:
    return accumulated.arrival.call.number


class _LayerCalls:
    """The calls of one layer in one backward.

    Attributes:
        reached: whether their gradient reaches the step through at least one parameter.
        finite: whether keys that are not finite have no effect, because their weight gradient was dropped. A key that
            is not finite in a gradient that does reach the step is refused earlier; see `StepCall.keys_of`.
        axis: the batch axis, where their rows were not tried.
        calls: their number so far.
    """

    __slots__ = ("axis", "calls", "finite", "reached")

    def __init__(self, layer: Watched, reached: Collection[str], axis: int) -> None:
        self.reached, whole = False, True
        for use, (name, _) in layer.parameters.items():
            if name in reached:
                self.reached = True
            elif use.parameter_map.multiplies_keys:
                whole = False
        self.finite = not whole and not layer.keys_only
        self.axis = axis
        self.calls = 0


class _Placed(NamedTuple):
    """Where the patterns of a call are in the batch, and the columns that they take.

    Attributes:
        rows: how many rows they are addressed by; with `positions` and `inner` as in `StepCall`.
        positions: see `rows`.
        inner: see `rows`.
        binding: the columns, if any.
        settled: whether what is missing among them is known not to belong to these patterns.
        check: what this call showed of the layer's rows beyond its trial, if anything.
    """

    rows: int
    positions: int
    inner: int
    binding: Binding | None
    settled: bool = False
    check: RowCheck | None = None


def _place(arrival: Arrival, axis: int, binding: Binding) -> _Placed:
    """Find the rows of a call's patterns: as the user gave them, as a trial found them, or by the batch axis."""
    layer, leading = arrival.call.layer.name, arrival.leading
    plain = address(leading, axis)
    if layer in binding.given:
        patterns = math.prod(leading)
        return _Placed(patterns, 1, 1, binding.at_given_rows(layer, patterns), settled=True)
    check = binding.checks.get(layer)
    if check is None or check.outcome == "assumed":
        taken = binding.fitting(*plain[:2])
        return _Placed(
            *plain, taken, check=None if taken is None else _relied_on(taken, check, tried=bool(binding.checks))
        )
    view = check.view(tuple(leading), binding.rows)
    if view is None:
        other = RowCheck("not aligned", OTHER_SHAPE) if check.outcome == "proved" else None
        return _Placed(*plain, binding.constants(), settled=True, check=other)
    placed = address(*view)
    return _Placed(*placed, binding.fitting(*placed[:2]))


OTHER_SHAPE = "its input has another shape than in the trial"
BY_PARTS = "parts of the model were called, and not the model itself"


def _relied_on(taken: Binding, check: RowCheck | None, *, tried: bool) -> RowCheck | None:
    """Return what to note of a layer whose rows no trial has told, and that takes columns per row all the same."""
    if taken.rows < 2:
        return None
    return RowCheck("assumed", UNCALLED if tried else BY_PARTS) if check is None else check


def address(leading: Sequence[int], batch_axis: int) -> tuple[int, int, int]:
    """Return (rows, positions, inner) of an input's leading axes, (outer, rows, inner) around the batch axis.

    >>> address((5, 3, 2), 1)
    (3, 10, 2)
    """
    if not leading:
        return 1, 1, 1
    if len(leading) == 1:
        return leading[0], 1, 1
    if len(leading) == 2:
        first, second = leading
        return (first, second, second) if batch_axis == 0 else (second, first, 1)
    axis = min(batch_axis, len(leading) - 1)
    inner = math.prod(leading[axis + 1 :])
    return leading[axis], math.prod(leading[:axis]) * inner, inner
