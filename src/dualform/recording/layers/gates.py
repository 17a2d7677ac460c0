"""Recurrent cells, unrolled: their gates computed again, and the errors at them. Pure.

A recurrent layer's kernel brings gradients to its outputs only. The errors at the gates' pre-activations, which are the
values of its weights, follow by going back through time once more: every gate in one product from the keys
[x_t ; h_{t-1}], then one small step per time. For an LSTM on a CPU the kernel's own workspace has them nearly ready
(`dualform.recording.layers.lstm_workspace`). Time is the order in which the cell runs, so a reversed direction comes
reversed. T steps, B rows, d input elements, H units.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dualform.identity.parameter_use import ParameterUse, Span
from dualform.recording.buffer_pool import new_rows
from dualform.recording.layers.lstm_workspace import (
    Layout,
    Workspace,
    cell_states,
    errors_in,
    find_layout,
    is_near,
    sigmoid_slope,
    tanh_slope,
)

MAX_LAYOUTS = 64
"""Shapes of calls whose workspaces are looked through; calls of further shapes are computed."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of one cell, as torch stacks its gates."""

    inputs: Tensor  # (G·H, d)
    hidden: Tensor  # (G·H, H)
    input_bias: Tensor | None  # (G·H,)
    hidden_bias: Tensor | None  # (G·H,)

    @property
    def units(self) -> int:
        """H."""
        return self.hidden.shape[1]

    def joined(self, keys: Tensor) -> Tensor:
        """Return W_ih x + b_ih + W_hh h + b_hh in one product, (T, B, G·H)."""
        weight = torch.cat([self.inputs, self.hidden], dim=1)
        result = new_rows((*keys.shape[:2], len(weight)), keys)
        rows, flat = keys.flatten(0, 1), result.view(-1, len(weight))
        if self.input_bias is None or self.hidden_bias is None:
            torch.mm(rows, weight.T, out=flat)
        else:
            torch.addmm(self.input_bias + self.hidden_bias, rows, weight.T, out=flat)
        return result


@dataclass(frozen=True, slots=True)
class Outer:
    """The errors that came from outside, in the cell's own order of time; zero where none came."""

    outputs: Tensor  # (T, B, H)
    hidden: Tensor  # (B, H), at the last hidden state
    cell: Tensor | None  # (B, H), at the last cell state of an LSTM


@dataclass(frozen=True, slots=True)
class Ran:
    """A cell's way through a sequence."""

    keys: Tensor  # (T, B, d + H), the input and the hidden state before
    last: Tensor  # (B, H), the output of the last step
    cell: Tensor | None  # (B, H), an LSTM's first cell state
    mask: Tensor | None  # (T, B, 1), false where a sequence has not begun or is over; nothing where all are as long
    workspace: Workspace | None = None  # of an LSTM that oneDNN ran


class Cell(ABC):
    """One kind of recurrent cell."""

    gates: int  # G, blocks of H rows in each weight
    blocks: int  # blocks of H elements in a value

    @abstractmethod
    def errors(self, weights: Weights, ran: Ran, outer: Outer) -> Tensor:
        """Return the values, (T, B, blocks · H).

        Args:
            weights: the cell's.
            ran: what it met and gave.
            outer: the errors from outside.
        """

    def uses(self, d: int, units: int) -> tuple[ParameterUse, ...]:
        """Return how the cell uses each parameter, under its name in torch without the number of the layer.

        The input's weight takes the first d columns of a key, the hidden state's weight the others.
        """
        return (
            ParameterUse("weight_ih", "weight_ih", "outer", keys=(0, d)),
            ParameterUse("weight_hh", "weight_hh", "outer", keys=(d, d + units)),
            ParameterUse("bias_ih", "bias_ih", "bias"),
            ParameterUse("bias_hh", "bias_hh", "bias"),
        )


class LSTM(Cell):
    """i, f, g, o; c' = f c + i g; h' = o tanh c'."""

    gates = 4
    blocks = 4

    layouts: ClassVar[dict[tuple[int, ...], Layout | None]] = {}
    """Shape of a call -> where its workspace has what; None where that was not found."""

    def errors(self, weights: Weights, ran: Ran, outer: Outer) -> Tensor:
        """Return the errors that the workspace of the call holds, or compute them."""
        memory = None if ran.workspace is None or ran.mask is not None else ran.workspace.take()
        if memory is None:
            return self.computed_errors(weights, ran, outer)
        shape = (*ran.keys.shape, weights.units)
        if shape not in self.layouts and len(self.layouts) < MAX_LAYOUTS:
            values = self.computed_errors(weights, ran, outer)
            if float(values.abs().sum()) in (0.0, math.inf) or not math.isfinite(values.sum()):
                return values  # numbers that are not to be told from others
            self.layouts[shape] = self._find_layout(memory, weights, ran, outer, values)
        layout = self.layouts.get(shape)
        found = None if layout is None else self._found_errors(memory, layout, weights, ran, outer)
        return self.computed_errors(weights, ran, outer) if found is None else found

    def _found_errors(self, memory: Tensor, layout: Layout, weights: Weights, ran: Ran, outer: Outer) -> Tensor | None:
        """Return the errors that a workspace holds, (T, B, 4H); None where it differs from what one step computes."""
        assert ran.cell is not None, "an LSTM has a first cell state"
        found = errors_in(memory, layout, outer.outputs, ran.cell)
        if found is None:
            return None
        t = len(ran.keys) // 2
        gates = self._gates(weights, ran.keys[t : t + 1])[0]
        before = found.values[t].flatten(1) @ weights.hidden
        i, f, g, _ = found.gates[t].unbind(1)
        after = torch.addcmul(i * g, f, found.states[t])
        pairs = (found.gates[t], gates), (found.hidden[t], before), (found.states[t + 1], after)
        return found.values.flatten(2) if all(is_near(*pair) for pair in pairs) else None

    def _gates(self, weights: Weights, keys: Tensor) -> Tensor:
        """Compute the gates, (T, B, 4, H)."""
        gates = weights.joined(keys).view(*keys.shape[:2], 4, weights.units)
        gates[:, :, :2].sigmoid_()
        gates[:, :, 2].tanh_()
        gates[:, :, 3].sigmoid_()
        return gates

    def _find_layout(self, memory: Tensor, weights: Weights, ran: Ran, outer: Outer, values: Tensor) -> Layout | None:
        """Look in a workspace for the gates, and for the errors that lead to these values (T, B, 4H)."""
        assert ran.cell is not None, "an LSTM has a first cell state"
        assert outer.cell is not None, "an LSTM has a last cell state"
        gates = self._gates(weights, ran.keys)
        i, f, g, o = gates.unbind(2)
        states = cell_states(i, f, g, ran.cell)
        bent = torch.tanh(states[1:])
        hidden = torch.cat([values @ weights.hidden, outer.hidden[None]])  # (T + 1, B, H)
        into_cell = tanh_slope((outer.outputs + hidden[1:]) * o, bent, bent)
        cell = [outer.cell]
        for t in reversed(range(len(f))):
            cell.append((cell[-1] + into_cell[t]) * f[t])
        return find_layout(memory, gates.flatten(2), hidden, torch.stack(cell[::-1]), states)

    def computed_errors(self, weights: Weights, ran: Ran, outer: Outer) -> Tensor:
        """Compute the gates again, and go back through the cell states and hidden states."""
        keys, cell, mask = ran.keys, ran.cell, ran.mask
        assert cell is not None, "an LSTM has a first cell state"
        assert outer.cell is not None, "an LSTM has a last cell state"
        steps, rows, _ = keys.shape
        units = weights.units
        gates = self._gates(weights, keys)
        i, f, g, o = gates.unbind(2)
        shape = steps, rows, units
        cells = new_rows((steps + 1, rows, units), keys)  # before each step, and after the last
        cells[0] = cell
        fresh = torch.mul(i, g, out=new_rows(shape, keys))
        forgetting, states = f.unbind(0), cells.unbind(0)
        for t, new in enumerate(fresh.unbind(0)):
            torch.addcmul(new, forgetting[t], states[t], out=states[t + 1])
            if mask is not None:
                states[t + 1].copy_(torch.where(mask[t], states[t + 1], cell))
        bent = torch.tanh(cells[1:], out=fresh)
        # What multiplies the error of the cell state in i, f, g; and of the hidden state in o and in the cell state.
        into = new_rows(gates.shape, keys)
        sigmoid_slope(g, i, into[:, :, 0])
        sigmoid_slope(cells[:-1], f, into[:, :, 1])
        tanh_slope(i, g, into[:, :, 2])
        sigmoid_slope(bent, o, into[:, :, 3])
        through = tanh_slope(o, bent, new_rows(shape, keys))
        values = new_rows(gates.shape, keys)
        at_cell, at_hidden = outer.cell.clone(), outer.hidden
        now = at_hidden + outer.outputs[-1]
        # Views of all steps at once: an index in the loop would take as long as what it is for.
        whole, inner, last = values.flatten(2).unbind(0), values[:, :, :3].unbind(0), values[:, :, 3].unbind(0)
        into_inner, into_last = into[:, :, :3].unbind(0), into[:, :, 3].unbind(0)
        slopes, outputs = through.unbind(0), outer.outputs.unbind(0)
        for t in reversed(range(steps)):
            torch.mul(now, into_last[t], out=last[t])
            inside = torch.addcmul(at_cell, now, slopes[t])
            torch.mul(inside[:, None], into_inner[t], out=inner[t])
            if mask is None:
                at_cell = inside.mul_(forgetting[t])
                if t:
                    now = torch.addmm(outputs[t - 1], whole[t], weights.hidden)
            else:
                whole[t].mul_(mask[t])
                at_cell = torch.where(mask[t], inside * forgetting[t], at_cell)
                if t:
                    at_hidden = torch.where(mask[t], whole[t] @ weights.hidden, at_hidden)
                    now = at_hidden + outputs[t - 1]
        return values.view(steps, rows, -1)


class GRU(Cell):
    """r, z; n = tanh(x_n + r h_n); h' = (1 - z) n + z h.

    The hidden weight's part of n is multiplied by r, so that its value there is r ⊙ the error at n: a value holds the
    errors at r and z, that one, and the error at n itself, which is the input weight's.
    """

    gates = 3
    blocks = 4

    def uses(self, d: int, units: int) -> tuple[ParameterUse, ...]:
        """The hidden weight takes the first three blocks of a value, the input weight all but the third."""
        width = 4 * units
        inputs: tuple[Span, ...] = (0, 2 * units), (3 * units, width)
        hidden: tuple[Span, ...] = ((0, 3 * units),)
        return (
            ParameterUse("weight_ih", "weight_ih", "outer", keys=(0, d), values=inputs, value_width=width),
            ParameterUse("weight_hh", "weight_hh", "outer", keys=(d, d + units), values=hidden, value_width=width),
            ParameterUse("bias_ih", "bias_ih", "bias", values=inputs, value_width=width),
            ParameterUse("bias_hh", "bias_hh", "bias", values=hidden, value_width=width),
        )

    def errors(self, weights: Weights, ran: Ran, outer: Outer) -> Tensor:
        """Go back through the hidden states."""
        keys, mask = ran.keys, ran.mask
        steps, rows, width = keys.shape
        units = weights.units
        x, h = keys.split([width - units, units], dim=2)
        of_input = torch.nn.functional.linear(x, weights.inputs, weights.input_bias)
        of_hidden = torch.nn.functional.linear(h, weights.hidden, weights.hidden_bias)
        r, z = torch.sigmoid(of_input[..., : 2 * units] + of_hidden[..., : 2 * units]).chunk(2, dim=2)
        behind = of_hidden[..., 2 * units :]
        n = torch.tanh(torch.addcmul(of_input[..., 2 * units :], r, behind))
        into_n = (1 - z) * (1 - n * n)
        into_z = (h - n) * z * (1 - z)
        into_r = behind * r * (1 - r)
        values = keys.new_empty(steps, rows, 4, units)
        at_hidden = outer.hidden
        for t in reversed(range(steps)):
            now = at_hidden + outer.outputs[t]
            mine = values[t]
            torch.mul(now, into_n[t], out=mine[:, 3])
            torch.mul(now, into_z[t], out=mine[:, 1])
            torch.mul(mine[:, 3], into_r[t], out=mine[:, 0])
            torch.mul(mine[:, 3], r[t], out=mine[:, 2])
            before = torch.addmm(now * z[t], mine.view(rows, -1)[:, : 3 * units], weights.hidden)
            if mask is None:
                at_hidden = before
            else:
                mine *= mask[t][:, None]
                at_hidden = torch.where(mask[t], before, at_hidden)
        return values.view(steps, rows, -1)


class Plain(Cell):
    """h' = tanh or relu of W_ih x + W_hh h."""

    gates = 1
    blocks = 1

    def __init__(self, nonlinearity: str) -> None:
        self._tanh = nonlinearity == "tanh"

    def errors(self, weights: Weights, ran: Ran, outer: Outer) -> Tensor:
        """Go back through the hidden states."""
        keys, mask, units = ran.keys, ran.mask, weights.units
        outputs = torch.cat([keys[1:, :, -units:], ran.last[None]])
        slope = 1 - outputs.square() if self._tanh else (outputs > 0).to(outputs.dtype)
        values = torch.empty_like(outputs)
        at_hidden = outer.hidden
        for t in reversed(range(len(keys))):
            now = at_hidden + outer.outputs[t]
            torch.mul(now, slope[t], out=values[t])
            if mask is None:
                at_hidden = values[t] @ weights.hidden
            else:
                values[t] *= mask[t]
                at_hidden = torch.where(mask[t], values[t] @ weights.hidden, at_hidden)
        return values
