"""What was accumulated since the last step, and the calls it becomes: which reach the step, where, which columns."""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dualform.recording.annotations import Binding
from dualform.recording.hooks import Arrival
from dualform.recording.rowcheck import RowCheck
from dualform.recording.sinks import CallRecord
from dualform.recording.trails import Trail
from dualform.recording.transfer import Brought, Transfer
from dualform.recording.watch import Watched


@dataclass(slots=True)
class Pending:
    """Accumulated since the last step: patterns by graph task, and a trail of probes per parameter."""

    tasks: list[int] = field(default_factory=list)  # index = micro
    arrivals: dict[int, list[Arrival]] = field(default_factory=dict)  # micro -> patterns
    trails: dict[str, Trail] = field(default_factory=dict)  # parameter -> probes

    def micro(self, task: int) -> int:
        """Return which backward of the step this graph task is."""
        if task not in self.tasks:
            self.tasks.append(task)
        return self.tasks.index(task)

    def cleared(self, parameters: Mapping[str, nn.Parameter], accumulating: str) -> bool:
        """Say whether every gradient that is pending was cleared without a step, as one parameter accumulates anew."""
        for name, trail in self.trails.items():
            if name == accumulating:
                left = trail.waiting is not None and not trail.waiting.zero
            else:
                gradient = parameters[name].grad
                left = gradient is not None and bool(gradient.any())
            if left:
                return False
        return True

    def keep(self, parameters: Collection[str]) -> None:
        """Let go of everything that none of these parameters waits for."""
        self.trails = {name: trail for name, trail in self.trails.items() if name in parameters}
        micros = {event.micro for trail in self.trails.values() for event in trail.accumulations}
        self.arrivals = {micro: brought for micro, brought in self.arrivals.items() if micro in micros}
        if not micros:
            self.tasks, self.trails = [], {}


@dataclass(frozen=True, slots=True)
class Misfit:
    """A column that a layer's patterns could not take; `everywhere` if no layer of the step could."""

    binding: Binding
    layer: str
    column: str
    text: str
    everywhere: bool


@dataclass(slots=True)
class Gathered:
    """The calls of a step, and what is to be said of their annotations."""

    calls: list[CallRecord] = field(default_factory=list)
    misfits: list[Misfit] = field(default_factory=list)
    skipped: bool = False  # whether annotations were left out that a skipped batch had
    checks: dict[str, RowCheck] = field(default_factory=dict)  # layers whose rows no trial has told


def gather_calls(
    arrivals: Mapping[int, Sequence[Arrival]],
    factors: Mapping[str, Sequence[float]],
    axis_of: Callable[[Watched], int],
) -> Gathered:
    """Return the calls whose gradient reaches the step through at least one parameter, with the columns that fit them.

    Args:
        arrivals: micro -> what was accumulated in it.
        factors: updated parameter -> its gradient's factor in each micro.
        axis_of: the batch axis of a layer whose rows were not tried.
    """
    gathered = Gathered()
    fitted: dict[int, set[str]] = {}  # binding -> columns that some layer took, or that are known not to belong to it
    misfits: list[tuple[Binding, str, str, str]] = []
    for micro, brought in sorted(arrivals.items()):
        numbers: dict[str, int] = {}
        for arrival in sorted(brought, key=lambda arrival: arrival.call.number):
            layer, binding = arrival.call.layer, arrival.call.binding
            if not any(name in factors and factors[name][micro] != 0.0 for name, _ in layer.parameters.values()):
                continue
            if binding is not None and not binding.belongs_to(arrival.call.forward):
                gathered.skipped, binding = True, None
            placed = _place(arrival, axis_of(layer), binding)
            if binding is not None:
                taken = fitted.setdefault(id(binding), set())
                if placed.settled:
                    taken.update(binding.columns)
                else:
                    names = set() if placed.binding is None else set(placed.binding.columns)
                    taken.update(names)
                    for name in binding.columns.keys() - names:
                        text = binding.misfit(name, layer.name, placed.rows, placed.positions)
                        misfits.append((binding, layer.name, name, text))
                if placed.check is not None:
                    gathered.checks[layer.name] = placed.check
            number = numbers[layer.name] = numbers.get(layer.name, -1) + 1
            gathered.calls.append(
                CallRecord(
                    layer=layer.name,
                    micro=micro,
                    call=number,
                    rows=placed.rows,
                    positions=placed.positions,
                    inner=placed.inner,
                    keys=_finite_keys(arrival, factors, micro),
                    values=None if layer.keys_only else arrival.values,
                    binding=placed.binding,
                    raw=arrival.call.raw,
                    layout=arrival.layout,
                )
            )
    gathered.misfits = [Misfit(b, layer, name, text, name not in fitted[id(b)]) for b, layer, name, text in misfits]
    return gathered


def _finite_keys(arrival: Arrival, factors: Mapping[str, Sequence[float]], micro: int) -> Tensor:
    """Return the keys of a call, with 0 for NaN and infinity where a weight gradient was dropped before the step.

    A gradient that is not finite may be zeroed before the step (`nan_to_num_`) while the bias of the same layer is
    trained on. The keys then multiply a factor of 0, but 0 · NaN is NaN in every sum. A key that is not finite in a
    gradient that does reach the step is refused earlier, so only keys without any effect are replaced here.
    """
    layer, keys = arrival.call.layer, arrival.keys
    assert keys is not None, "only accumulated arrivals are pending"
    reached = {name for name in factors if factors[name][micro] != 0.0}
    whole = all(name in reached for use, (name, _) in layer.parameters.items() if use.parameter_map.multiplies_keys)
    if whole or layer.keys_only or not keys.is_floating_point():
        return keys
    return torch.nan_to_num(keys, nan=0.0, posinf=0.0, neginf=0.0)


@dataclass(frozen=True, slots=True)
class _Placed:
    """Where the patterns of a call are in the batch, and the columns that they take.

    Attributes:
        rows: how many rows they are addressed by; with `positions` and `inner` as in `CallRecord`.
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


def _place(arrival: Arrival, axis: int, binding: Binding | None) -> _Placed:
    """Find the rows of a call's patterns: as the user gave them, as a trial found them, or by the batch axis."""
    layer, leading = arrival.call.layer.name, tuple(arrival.leading)
    plain = address(leading, axis)
    if binding is None:
        return _Placed(*plain, None)
    if layer in binding.given:
        patterns = math.prod(leading)
        return _Placed(patterns, 1, 1, binding.at_given_rows(layer, patterns), settled=True)
    check = binding.checks.get(layer)
    if check is None or check.outcome == "assumed":
        taken = binding.fitting(*plain[:2])
        return _Placed(
            *plain, taken, check=None if taken is None else _relied_on(taken, check, tried=bool(binding.checks))
        )
    view = check.view(leading, binding.rows)
    if view is None:
        other = RowCheck("not aligned", OTHER_SHAPE) if check.outcome == "proved" else None
        return _Placed(*plain, binding.constants(), settled=True, check=other)
    placed = address(*view)
    return _Placed(*placed, binding.fitting(*placed[:2]))


OTHER_SHAPE = "its input has another shape than in the trial"
BY_PARTS = "parts of the model were called, and not the model itself"
UNCALLED = "it was not called in the trial"


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
    axis = min(batch_axis, len(leading) - 1)
    size = torch.Size(leading)
    inner = size[axis + 1 :].numel()
    return leading[axis], size[:axis].numel() * inner, inner


def bring(
    calls: Sequence[CallRecord], samples: Mapping[str, Tensor], transfer: Transfer | None
) -> tuple[Sequence[CallRecord], Mapping[str, Tensor], Brought | None]:
    """Let a step's patterns and samples come from a GPU, if they are there; whoever looks at them waits for them."""
    tensors = [t for call in calls for t in (call.keys, call.values) if t is not None] + list(samples.values())
    devices = {tensor.device for tensor in tensors}
    if all(device.type == "cpu" for device in devices):
        return calls, samples, None
    if transfer is not None and devices == {transfer.device}:
        brought = transfer.bring(tensors)
    else:
        brought = Brought([tensor.cpu() for tensor in tensors], lambda: None, lambda: None)
    here = iter(brought.tensors)
    calls = [
        dataclasses.replace(call, keys=next(here), values=None if call.values is None else next(here)) for call in calls
    ]
    return calls, {name: next(here) for name in samples}, brought
