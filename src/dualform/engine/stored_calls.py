"""The calls of one step that reach some parameters, decoded: what a step's gradients are summed from again."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualform.engine.addresses import Calls
from dualform.engine.description import LayerEntry
from dualform.engine.reading import decode
from dualform.engine.source import PatternPart, PatternSource, Rows, find_part
from dualform.identity.parameter_use import ParameterUse
from dualform.recording.layers import sums_in_own_order
from dualform.recording.layouts import bias_gradient, laid_out


@dataclass(frozen=True, slots=True)
class StoredCall:
    """The patterns of one call of a layer, decoded.

    Attributes:
        part: the part that holds them.
        layer: the layer's name.
        entry: the layer's entry in the description.
        rows: the places of the call's patterns among those of its layer in the part.
        micro: which backward of its step the call belongs to.
        rank: the process that recorded it.
        keys: (n, d_in)
        values: (n, d_out)
        layout: how the values lay in memory in training; None where that is not known.
        whole: whether the patterns are stored without loss, and summed as autograd sums them.
        key_dtype: the dtype that the keys are stored in.
        value_dtype: the dtype that the values are stored in.
    """

    part: PatternPart
    layer: str
    entry: LayerEntry
    rows: slice
    micro: int
    rank: int
    keys: Tensor
    values: Tensor
    layout: str | None
    whole: bool
    key_dtype: torch.dtype
    value_dtype: torch.dtype

    def gradient(self, use: ParameterUse, shape: Sequence[int]) -> Tensor:
        """Return the call's gradient of a parameter, summed as autograd summed it.

        A bias sums errors in the order in which they lie in memory. Where its true gradient is zero, as that of a key
        projection's bias, rounding is all there is of it, and Adam makes much of that.
        """
        if use.parameter_map.is_bias and self.layout is not None:
            return bias_gradient(use.parameter_map, laid_out(self.values, self.layout), shape)
        return use.parameter_map.gradient(self.values, self.keys, shape)

    def rounding(self, use: ParameterUse, shape: Sequence[int]) -> Tensor:
        """Return how far each element of the call's gradient may be from the one that autograd found, in float64.

        Two things are rounded: the sum over patterns, which in another order is off by up to half a unit in the last
        place of sum |value| |key|; and, at random, each key and value that is stored in a coarser dtype.
        """
        parameter_map = use.parameter_map
        values, keys = self.values.double(), self.keys
        squares = keys  # integer keys are places, not numbers
        if keys.is_floating_point():
            keys = keys.double()
            squares = keys.square()
        found = torch.finfo(self.values.dtype).eps / 2 * parameter_map.gradient(values.abs(), keys.abs(), shape)
        stored = torch.zeros_like(found)
        if self.value_dtype != self.values.dtype:
            stored += parameter_map.gradient(storage_variance(values, self.value_dtype), squares, shape)
        if self.key_dtype != self.keys.dtype and parameter_map.multiplies_keys:
            stored += parameter_map.gradient(values.square(), storage_variance(keys, self.key_dtype), shape)
        return found + stored.sqrt()

    def exact(self, use: ParameterUse, shape: Sequence[int], rows: Tensor | slice = slice(None)) -> Tensor:
        """Return the gradient that (some of) the call's patterns give one of the layer's parameters, in float64."""
        keys = self.keys[rows]
        keys = keys.double() if keys.is_floating_point() else keys
        return use.parameter_map.gradient(self.values[rows].double(), keys, shape)


def storage_variance(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the variance of what each element of rows (T, d) lost when they were stored in a coarser dtype.

    Of floating-point numbers it is the square of the most that can be lost: half a unit in the last place; of float16,
    whose rows are scaled to their largest element, at least half of its smallest number beside that.

    An int8 element is a whole number n of units, 1/127 of its row's largest element. It was y units, rounded to one of
    the two whole numbers beside y at random, so that the variance is f · (1 − f) with f = y − floor(y), and y is not
    known any more. Returned is 0 for n = 0, 1 for n = ±1, and 1/4 for every other n. Its mean over the rounding is at
    least f · (1 − f) for every y, and nearly that where |y| is far below 1, as in the values of a softmax.
    """
    if dtype == torch.int8:
        unit = rows.abs().amax(dim=1, keepdim=True) / 127 if rows.shape[1] else rows[:, :1]
        whole = (rows.abs() / unit.clamp(min=torch.finfo(rows.dtype).tiny)).round()
        return unit.square() * torch.where(whole > 1, 0.25, whole)
    lost = torch.finfo(dtype).eps / 2 * rows.abs()
    if dtype == torch.float16 and rows.shape[1]:
        lost = lost.maximum(torch.finfo(dtype).smallest_normal * 2**-10 * rows.abs().amax(dim=1, keepdim=True))
    return lost.square()


class StepReader:
    """Reads the calls of any step that reach some parameters; one part is open at a time."""

    def __init__(self, source: PatternSource, parameters: Collection[str]) -> None:
        self._source = source
        wanted = set(parameters)
        self._layers = [n for n, entry in source.layers.items() if set(entry.parameters.values()) & wanted]
        for layer in self._layers:
            source.require_values(layer)
            source.require_patterns(layer, f"taking the steps of {', '.join(map(repr, sorted(wanted)))} again")
        self._part: PatternPart | None = None
        self._opened: dict[str, tuple[Calls, Rows, Rows]] = {}

    def calls(self, step: int) -> list[StoredCall]:
        """Return a step's calls, in the order of layers and forward calls."""
        part = self._part
        if part is None or not part.start <= step < part.stop:
            part = self._part = find_part(self._source, step)
            self._opened = {
                layer: (part.calls(layer), part.rows(layer, "keys"), part.rows(layer, "values"))
                for layer in self._layers
                if part.count(layer)
            }
        return [call for layer in self._opened for call in self._read(part, layer, step)]

    def _read(self, part: PatternPart, layer: str, step: int) -> Iterator[StoredCall]:
        table, keys, values = self._opened[layer]
        entry = self._source.layer(layer)
        dtype: torch.dtype = getattr(torch, self._source.description.parameters[entry.uses[0].parameter].dtype)
        for i in range(*np.searchsorted(table["step"], [step, step + 1]).tolist()):
            rows = slice(int(table["offset"][i]), int(table["offset"][i] + table["rows"][i] * table["positions"][i]))
            yield StoredCall(
                part=part,
                layer=layer,
                entry=entry,
                rows=rows,
                micro=int(table["micro"][i]),
                rank=int(table["rank"][i]) if "rank" in table else 0,
                keys=decode(*keys.take(rows), dtype).cpu(),
                values=decode(*values.take(rows), dtype).cpu(),
                layout=table["layout"][i],
                whole=not sums_in_own_order(entry.kind)
                and all(stored.dtype in (dtype, torch.int64) for stored in (keys, values)),
                key_dtype=keys.dtype,
                value_dtype=values.dtype,
            )
