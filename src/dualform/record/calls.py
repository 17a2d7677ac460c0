"""What was accumulated since the last step, and the calls it becomes: which reach the step, where, which columns."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dualform.record.annotations import Binding
from dualform.record.hooks import Arrival
from dualform.record.sinks import CallRecord
from dualform.record.trails import Trail
from dualform.record.transfer import Brought, Transfer
from dualform.record.watch import Watched


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
    text: str
    everywhere: bool


def gather_calls(
    arrivals: Mapping[int, Sequence[Arrival]],
    factors: Mapping[str, Sequence[float]],
    axis_of: Callable[[Watched], int],
) -> tuple[list[CallRecord], list[Misfit]]:
    """Return the calls whose gradient reaches the step through at least one parameter, and the columns that do not fit.

    Args:
        arrivals: micro -> what was accumulated in it.
        factors: updated parameter -> its gradient's factor in each micro.
        axis_of: the batch axis of a layer.
    """
    calls: list[CallRecord] = []
    fitted: dict[int, set[str]] = {}  # binding -> columns that some layer took
    misfits: list[tuple[Binding, str, str, str]] = []
    for micro, brought in sorted(arrivals.items()):
        numbers: dict[str, int] = {}
        for arrival in sorted(brought, key=lambda arrival: arrival.call.number):
            layer, binding = arrival.call.layer, arrival.call.binding
            if not any(name in factors and factors[name][micro] != 0.0 for name, _ in layer.parameters.values()):
                continue
            assert arrival.keys is not None, "only accumulated arrivals are pending"
            rows, positions, inner = address(arrival.leading, axis_of(layer))
            if binding is not None:
                taken = binding.fitting(rows, positions)
                names = set() if taken is None else set(taken.columns)
                fitted.setdefault(id(binding), set()).update(names)
                for name in binding.columns.keys() - names:
                    misfits.append((binding, layer.name, name, binding.misfit(name, layer.name, rows, positions)))
                binding = taken
            number = numbers[layer.name] = numbers.get(layer.name, -1) + 1
            values = None if layer.keys_only else arrival.values
            calls.append(
                CallRecord(
                    layer=layer.name,
                    micro=micro,
                    call=number,
                    rows=rows,
                    positions=positions,
                    inner=inner,
                    keys=arrival.keys,
                    values=values,
                    binding=binding,
                    raw=arrival.call.raw,
                    layout=arrival.layout,
                )
            )
    return calls, [Misfit(b, layer, text, name not in fitted[id(b)]) for b, layer, name, text in misfits]


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
