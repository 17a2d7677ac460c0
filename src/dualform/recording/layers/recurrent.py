"""`nn.LSTM`, `nn.GRU`, `nn.RNN` and their cells: one recorded layer per layer and direction, keys [x_t ; h_{t-1}].

The user's own kernel runs with the user's own weights, once per layer; it is only followed. A packed sequence is
recorded as the padded batch it came from, with keys and values of zero behind the end of a row. Cells with a projection
(`proj_size`) are not covered.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from dualform.identity.parameter_use import ParameterUse
from dualform.recording.layers.composite import Composite, Report, Tracer, composes
from dualform.recording.layers.gates import GRU, LSTM, Cell, Outer, Plain, Ran, Weights
from dualform.recording.layers.layer_kind import LayerKind, present
from dualform.recording.layers.lstm_workspace import workspace_of
from dualform.recording.sharded_modules import original_type
from dualform.torch_modes import without_gradients


@dataclass(frozen=True, slots=True)
class Unrolled:
    """One call of one layer in one direction, in its own order of time."""

    ran: Ran
    weights: Weights
    sizes: Tensor | None  # its batch sizes
    unsorted: Tensor | None  # (B,), where each of its rows came from
    direction: int  # 0, or 1 for reversed
    batched: bool

    def presented(self, rows: Tensor) -> Tensor:
        """Return rows in this order of time, (T, B, n), as the user's batch has them."""
        rows = rows.flip(0) if self.direction else rows
        if self.unsorted is not None:
            rows = rows.index_select(1, self.unsorted)
        return rows if self.batched else rows[:, 0]

    def errors(self, outputs: Tensor | None, hidden: Tensor | None, cell: Tensor | None) -> Outer:
        """Return the errors at a call's outputs as this direction meets them."""
        units = self.weights.units
        if outputs is None:
            own = self.ran.keys.new_zeros(*self.ran.keys.shape[:2], units)
        else:
            own = outputs[..., self.direction * units : (self.direction + 1) * units]
            own = own.reshape(*self.ran.keys.shape[:2], units) if self.sizes is None else _padded(own, self.sizes)
            own = own.flip(0) if self.direction else own
        nothing = self.ran.keys.new_zeros(self.ran.keys.shape[1], units)
        last = [nothing if state is None else state[self.direction].reshape_as(nothing) for state in (hidden, cell)]
        return Outer(own, last[0], last[1] if self.ran.cell is not None else None)


class Part(LayerKind):
    """One layer in one direction, or a cell."""

    batch_axis = 1
    rounding = 16.0  # slopes of saturated gates, computed again, lose digits

    def __init__(self, name: str, cell: Cell, module: nn.Module, suffix: str) -> None:
        self.name = name
        self._cell = cell
        weight = getattr(module, f"weight_ih{suffix}")
        self._inputs, self._units = weight.shape[1], weight.shape[0] // cell.gates
        uses = cell.uses(self._inputs, self._units)
        self._uses = present(module, *(dataclasses.replace(use, parameter=use.parameter + suffix) for use in uses))

    def uses(self, module: nn.Module) -> tuple[ParameterUse, ...]:
        """Each weight takes its part of the key; the biases take the value."""
        return self._uses

    def widths(self, module: nn.Module) -> tuple[int, int]:
        """Return the widths of [x ; h] and of the gates."""
        return self._inputs + self._units, self._cell.blocks * self._units

    def keys(self, module: nn.Module, inputs: Any) -> Tensor:
        """Return [x ; h] of every time, (T, B, d + H) or (T, d + H)."""
        unrolled: Unrolled = inputs
        ran = unrolled.ran
        keys = ran.keys if ran.mask is None else ran.keys * ran.mask
        return unrolled.presented(keys)

    def errors(self, module: nn.Module, inputs: Any, errors: Sequence[Tensor | None]) -> Tensor:
        """Return the errors at the gates, (T, B, gates · H)."""
        unrolled: Unrolled = inputs
        outputs, hidden, cell = (*errors, None)[:3]
        outer = unrolled.errors(outputs, hidden, cell)
        values = self._cell.errors(unrolled.weights, unrolled.ran, outer)
        return unrolled.presented(values)

    def release(self, inputs: Any) -> None:
        """Let go of the workspace of the call."""
        unrolled: Unrolled = inputs
        if unrolled.ran.workspace is not None:
            unrolled.ran.workspace.take()


class _CellPart(Part):
    """A cell module: one time step, rows only."""

    batch_axis = 0

    def keys(self, module: nn.Module, inputs: Any) -> Tensor:
        """Return [x ; h], (B, d + H)."""
        return super().keys(module, inputs)[0]

    def errors(self, module: nn.Module, inputs: Any, errors: Sequence[Tensor | None]) -> Tensor:
        """Return the errors at the gates: the new states are all the outputs there are."""
        hidden, cell = (*(None if error is None else error[None] for error in errors), None)[:2]
        return super().errors(module, inputs, [None, hidden, cell])[0]


def _cell_of(module: nn.Module) -> Cell:
    if isinstance(module, nn.LSTM | nn.LSTMCell):
        return LSTM()
    if isinstance(module, nn.GRU | nn.GRUCell):
        return GRU()
    return Plain(cast("nn.RNN", module).nonlinearity)


@composes(nn.LSTM, nn.GRU, nn.RNN)
class Recurrent(Composite):
    """Layers and directions named as torch names their weights: `l0`, `l0_reverse`, `l1`, ..."""

    key_text = "[x_t ; h_{t-1}], per layer and direction (`l0`, `l0_reverse`, ...)"

    own_order = True

    def parts(self, module: nn.Module) -> Mapping[str, LayerKind]:
        """Return a part per layer and direction."""
        layer = cast("nn.RNNBase", module)
        if layer.proj_size:
            return {}
        sides = ("", "_reverse") if layer.bidirectional else ("",)
        names = [f"l{i}{side}" for i in range(layer.num_layers) for side in sides]
        return {name: Part(original_type(module).__name__, _cell_of(module), module, f"_{name}") for name in names}

    def trace(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], report: Report
    ) -> TorchFunctionMode:
        """Follow the kernel of torch that the module calls."""
        given = args[0] if args else kwargs["input"]
        packed = isinstance(given, PackedSequence)
        unsorted = given.unsorted_indices if packed else None
        batched = packed or given.dim() == 3

        def follow(kernel: Callable[..., Any], *arguments: Any) -> Any:
            return _follow(kernel, arguments, report, unsorted=unsorted, batched=batched)

        return Tracer(dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), follow))


@composes(nn.LSTMCell, nn.GRUCell, nn.RNNCell)
class Cells(Composite):
    """A cell is one layer, under its own name."""

    key_text = "[x_t ; h_{t-1}]"

    own_order = True

    def parts(self, module: nn.Module) -> Mapping[str, LayerKind]:
        """Return the only part."""
        return {"": _CellPart(original_type(module).__name__, _cell_of(module), module, "")}

    def trace(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], report: Report
    ) -> TorchFunctionMode:
        """Follow the cell function of torch that the module calls."""
        batched = (args[0] if args else kwargs["input"]).dim() == 2

        def follow(function: Callable[..., Any], x: Tensor, hx: Any, *weights: Tensor | None) -> Any:
            result = function(x, hx, *weights)
            hidden, cell = hx if isinstance(hx, tuple | list) else (hx, None)
            results = result if isinstance(result, tuple) else (result,)
            if cell is not None:  # inside, h' is made of c': a copy of c' sees only what comes from outside
                results = results[0], results[1].clone()

            def unrolled() -> Unrolled:
                keys = torch.cat([x.detach(), hidden.detach()], dim=-1)[None]
                rows = keys.reshape(1, -1, keys.shape[-1])
                last = results[0].detach().clone().reshape(rows.shape[1], -1)
                first = None if cell is None else cell.detach().reshape_as(last)
                return Unrolled(Ran(rows, last, first, None), _weights(weights), None, None, 0, batched)

            report("", unrolled, results)
            return results if isinstance(result, tuple) else result

        return Tracer(dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), follow))


def _follow(
    kernel: Callable[..., Any], arguments: tuple[Any, ...], report: Report, *, unsorted: Tensor | None, batched: bool
) -> Any:
    """Run a kernel of torch layer by layer, report every layer and direction, and return what it returns."""
    sizes: Tensor | None = None
    if isinstance(arguments[3], bool):
        x, hx, weights, biases, layers, dropout, training, both, batch_first = arguments
    else:
        x, sizes, hx, weights, biases, layers, dropout, training, both = arguments
        batch_first = False
    states = list(hx) if isinstance(hx, tuple | list) else [hx]
    directions, each = (2 if both else 1), (4 if biases else 2)
    outputs = x.transpose(0, 1) if batch_first else x
    finals: list[list[Tensor]] = []
    for layer in range(layers):
        mine = weights[layer * directions * each : (layer + 1) * directions * each]
        first = [s if layers == 1 else s[layer * directions : (layer + 1) * directions] for s in states]
        begin = first[0] if len(first) == 1 else first
        x = outputs
        if sizes is None:
            outputs, *last = kernel(x, begin, mine, biases, 1, 0.0, training, both, False)
        else:
            outputs, *last = kernel(x, sizes, begin, mine, biases, 1, 0.0, training, both)
        finals.append(last)
        for direction in range(directions):
            own = mine[direction * each : (direction + 1) * each]
            begun = [s[direction] for s in first]
            unrolled = partial(_unrolled, x, outputs, sizes, begun, own, direction, unsorted, batched)
            report(f"l{layer}{'_reverse' if direction else ''}", unrolled, [outputs, *last])
        if dropout and training and layer < layers - 1:
            outputs = functional.dropout(outputs, dropout, training=True)
    joined = [last[0] if layers == 1 else torch.cat(last) for last in zip(*finals, strict=True)]
    return (outputs.transpose(0, 1) if batch_first else outputs, *joined)


@without_gradients
def _unrolled(
    x: Tensor,
    outputs: Tensor,
    sizes: Tensor | None,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    direction: int,
    unsorted: Tensor | None,
    batched: bool,
) -> Unrolled:
    """Copy a layer's input and hidden states into keys, in the order of time of one direction."""
    hidden, cell = (*(state.detach() for state in states), None)[:2]
    assert hidden is not None
    units = hidden.shape[-1]
    own = outputs.detach()[..., direction * units : (direction + 1) * units]
    x, mask = x.detach(), None
    if sizes is not None:
        x, own = _padded(x, sizes), _padded(own, sizes)
        mask = (torch.arange(x.shape[1]) < sizes[:, None]).to(x.device)[..., None]
    if direction:
        x, own = x.flip(0), own.flip(0)
        mask = None if mask is None else mask.flip(0)
    steps, rows, width = x.shape
    keys = x.new_empty(steps, rows, width + units)
    keys[..., :width] = x
    keys[0, :, width:] = hidden
    keys[1:, :, width:] = own[:-1] if mask is None else torch.where(mask[:-1], own[:-1], hidden)
    ran = Ran(keys, own[-1].clone(), cell, mask, None if cell is None else workspace_of(outputs))
    return Unrolled(ran, _weights(weights), sizes, unsorted, direction, batched)


def _padded(data: Tensor, sizes: Tensor) -> Tensor:
    """Return a packed sequence's data as (T, B, n), zero behind the ends."""
    padded: Tensor = torch._VF._pad_packed_sequence(data, sizes, False, 0.0, len(sizes))[0]
    return padded


def _weights(weights: Sequence[Tensor | None]) -> Weights:
    inputs, hidden, *biases = (_detached(weight) for weight in weights)
    assert inputs is not None, "every cell has an input weight"
    assert hidden is not None, "every cell has a hidden weight"
    first, second = (*biases, None, None)[:2]
    return Weights(inputs, hidden, first, second)


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()
