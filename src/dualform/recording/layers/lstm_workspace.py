"""The workspace of oneDNN's LSTM: the gates and the errors of a call, which the training itself has computed.

On a CPU torch runs an LSTM in float32 by oneDNN. Its forward keeps the gates and cell states in a workspace, and its
backward writes the errors that go from each time step to the one before into the same memory. With all of them, the
errors at the gates are a few elementwise products. Without them the gates have to be computed again and the errors
followed back step by step (`dualform.recording.layers.gates`), which takes nearly as long as training.

The layout of the workspace is documented nowhere, so nothing here relies on it unseen. The first call of each shape is
computed in full, and the layout is found by looking for the computed numbers in the workspace. Every later call is
compared with numbers computed at one of its time steps. Where anything differs, the call is computed in full.
T steps, B rows, d input elements, H units.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.recording.buffer_pool import new_rows

NODE = "MkldnnRnnLayerBackward0"
"""Autograd's name for the backward of oneDNN's recurrent layers."""
PAGE_ELEMENTS = 1024
"""Elements between the places in a workspace where an array may begin: 4096 bytes of float32."""
MAX_PADDING_ELEMENTS = 64
"""Elements that may lie unused behind each row of an array."""
SAME = 1e-4
"""How far numbers of a workspace may be from computed ones, relative to the largest of them.

Rounding moves them by about 1e-6; numbers of another place or call differ by about 1.
"""


class Workspace:
    """The workspace of one call, until somebody takes it: a later backward through the same call writes into it."""

    __slots__ = ("_memory",)

    def __init__(self, memory: Tensor) -> None:
        self._memory: Tensor | None = memory

    def take(self) -> Tensor | None:
        """Return the memory as float32 the first time, and None from then on."""
        memory, self._memory = self._memory, None
        return memory


def workspace_of(outputs: Tensor) -> Workspace | None:
    """Return the workspace of the call of oneDNN's LSTM that gave these outputs; None where there is none to read.

    Where hooks for saved tensors are on (activation checkpointing, offloading), asking autograd for the workspace would
    call them, so nobody asks.
    """
    node = outputs.grad_fn
    hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if node is None or node.name() != NODE or hooks is None or hooks(True) is not None:
        return None
    memory = getattr(node, "_saved_result3", None)
    if not isinstance(memory, Tensor) or memory.dtype != torch.uint8 or not memory.is_contiguous():
        return None
    page = PAGE_ELEMENTS * torch.float32.itemsize
    flat = memory.view(-1)
    return Workspace(flat[: len(flat) // page * page].view(torch.float32)) if len(flat) >= page else None


@dataclass(frozen=True, slots=True)
class Place:
    """Where an array (n, B, width) lies in a workspace: the element that it begins with, and those from row to row."""

    begin: int
    row: int

    def view(self, memory: Tensor, shape: tuple[int, int, int]) -> Tensor | None:
        """Return the array of this shape; None where the workspace is too small for it."""
        count, rows, _ = shape
        if self.begin + count * rows * self.row > len(memory):
            return None
        return memory.as_strided(shape, (rows * self.row, self.row, 1), memory.storage_offset() + self.begin)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a workspace holds the arrays of a call.

    Attributes:
        gates: of the gates (T, B, 4H), behind their nonlinearities.
        hidden: of the errors at the hidden states before each step and at the end, (T + 1, B, H).
        cell: the same of the cell states.
        states: of the cell states after every step but the last, (T - 1, B, H); None where they have to be computed.
    """

    gates: Place
    hidden: Place
    cell: Place
    states: Place | None = None


def find_layout(memory: Tensor, gates: Tensor, hidden: Tensor, cell: Tensor, states: Tensor) -> Layout | None:
    """Return where a workspace holds arrays that were computed; None where it does not hold all but the last.

    Args:
        memory: the workspace after the backward.
        gates: (T, B, 4H), behind their nonlinearities.
        hidden: (T + 1, B, H), the errors at the hidden states before each step and at the end.
        cell: (T + 1, B, H), the same at the cell states.
        states: (T + 1, B, H), the cell states before each step and at the end.
    """
    of_gates, of_hidden, of_cell = (_find(memory, wanted) for wanted in (gates, hidden, cell))
    if of_gates is None or of_hidden is None or of_cell is None:
        return None
    return Layout(of_gates, of_hidden, of_cell, _find(memory, states[1:-1]) if len(states) > 2 else None)


def _find(memory: Tensor, wanted: Tensor) -> Place | None:
    """Return where a workspace holds an array (n, B, width); None where it does not."""
    width = wanted.shape[2]
    heads = memory.view(-1, PAGE_ELEMENTS)[:, :width]
    first = wanted[0, 0, :PAGE_ELEMENTS]
    limit = SAME * float(wanted.abs().max())
    begins = ((heads - first).abs().amax(dim=1) <= limit).nonzero().flatten() * PAGE_ELEMENTS
    for begin in begins.tolist():
        for row in range(width, width + MAX_PADDING_ELEMENTS + 1):
            found = Place(begin, row).view(memory, (wanted.shape[0], wanted.shape[1], width))
            if found is not None and is_near(found[0, -1], wanted[0, -1]) and is_near(found, wanted):
                return Place(begin, row)
    return None


def is_near(found: Tensor, computed: Tensor) -> bool:
    """Say whether numbers that were found are computed ones but for rounding, and any of them is not zero."""
    largest = float(computed.abs().max())
    return largest > 0 and float((found - computed).abs().max()) <= SAME * largest


@dataclass(frozen=True, slots=True)
class FoundErrors:
    """What a workspace says of a call.

    Attributes:
        gates: (T, B, 4, H), behind their nonlinearities.
        hidden: (T + 1, B, H), the errors at the hidden states before each step and at the end.
        values: (T, B, 4, H), the errors at the gates.
        states: (T + 1, B, H), the cell states before each step and at the end.
    """

    gates: Tensor
    hidden: Tensor
    values: Tensor
    states: Tensor


def errors_in(memory: Tensor, layout: Layout, outputs: Tensor, first: Tensor) -> FoundErrors | None:
    """Return the errors at an LSTM's gates from its workspace; None where that is too small.

    Args:
        memory: the workspace after the backward.
        layout: where its arrays lie.
        outputs: (T, B, H), the errors that came to the outputs from outside.
        first: (B, H), the first cell state.
    """
    steps, rows, units = outputs.shape
    joined = layout.gates.view(memory, (steps, rows, 4 * units))
    hidden = layout.hidden.view(memory, (steps + 1, rows, units))
    at_cell = layout.cell.view(memory, (steps + 1, rows, units))
    if joined is None or hidden is None or at_cell is None:
        return None
    gates = joined.unflatten(2, (4, units))
    i, f, g, o = gates.unbind(2)
    between = steps - 1, rows, units
    cells = cell_states(i, f, g, first, None if layout.states is None else layout.states.view(memory, between))
    bent = torch.tanh(cells[1:])
    now = outputs + hidden[1:]
    values = new_rows(gates.shape, first)
    into_i, into_f, into_g, into_o = values.unbind(2)
    product = now * bent
    sigmoid_slope(product, o, into_o)
    inside = tanh_slope(torch.mul(now, o, out=product), bent, bent).add_(at_cell[1:])
    sigmoid_slope(torch.mul(inside, g, out=product), i, into_i)
    sigmoid_slope(torch.mul(inside, cells[:-1], out=product), f, into_f)
    tanh_slope(torch.mul(inside, i, out=product), g, into_g)
    return FoundErrors(gates, hidden, values, cells)


def cell_states(i: Tensor, f: Tensor, g: Tensor, first: Tensor, between: Tensor | None = None) -> Tensor:
    """Return the cell states before each step and after the last, (T + 1, B, H).

    Args:
        i: (T, B, H), a gate, as are the others.
        f: the gate that keeps the state before.
        g: the gate that is added.
        first: (B, H), the state before the first step.
        between: (T - 1, B, H), the states after all steps but the last; nothing where they have to be computed.
    """
    cells = new_rows((len(i) + 1, *first.shape), first)
    cells[0] = first
    if between is not None:
        cells[1:-1].copy_(between)
        torch.mul(i[-1], g[-1], out=cells[-1]).addcmul_(f[-1], cells[-2])
        return cells
    states, forgetting = cells.unbind(0), f.unbind(0)
    torch.mul(i, g, out=cells[1:])
    for t, state in enumerate(states[1:]):
        state.addcmul_(forgetting[t], states[t])
    return cells


def sigmoid_slope(factor: Tensor, gate: Tensor, out: Tensor) -> Tensor:
    """Return factor · gate · (1 - gate), with the slope of a sigmoid that gave `gate`, in one pass."""
    slope: Tensor = torch.ops.aten.sigmoid_backward.grad_input(factor, gate, grad_input=out)
    return slope


def tanh_slope(factor: Tensor, gate: Tensor, out: Tensor) -> Tensor:
    """Return factor · (1 - gate²), with the slope of a tanh that gave `gate`, in one pass."""
    slope: Tensor = torch.ops.aten.tanh_backward.grad_input(factor, gate, grad_input=out)
    return slope
